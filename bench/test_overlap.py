"""How much of communication is hidden, on a link as slow as the computation. Needs root and iproute2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.cases.bucket_overlap import gradient_buckets
from bench.cases.linear_overlap import measure
from bench.cases.linear_timeline import write
from bench.slow_link import SlowLink, why_not
from tpkernels.comm.engine import EngineChoice


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    if reason := why_not():
        pytest.skip(reason)
    with SlowLink(bits_per_second=1e9) as link:
        yield link


@pytest.mark.benchmark(group="hidden communication")
@pytest.mark.parametrize("engine", ["cpp", "python"])
def test_gradient_buckets(benchmark: BenchmarkFixture, link: SlowLink, engine: EngineChoice) -> None:
    overlap = link.run(gradient_buckets, engine, 9, timeout=300)[0]
    benchmark.extra_info.update(share=overlap.share, balance=overlap.balance)
    print(f"\ngradient buckets, {engine}: {overlap}")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # timed above, on the ranks


@pytest.mark.benchmark(group="overlap efficiency")
@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0])
@pytest.mark.parametrize(
    "case",
    ["column forward", "row forward", "column backward", "row backward"],
    ids=lambda c: c.replace(" ", "_"),
)
def test_linear(benchmark: BenchmarkFixture, link: SlowLink, case: str, ratio: float) -> None:
    overlap = link.run(measure, case, ratio, 7, timeout=300)[0]
    benchmark.extra_info.update(efficiency=overlap.efficiency, ratio=overlap.ratio)
    print(f"\n{case}: {overlap}")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # timed above, on the ranks


@pytest.mark.benchmark(group="time line")
@pytest.mark.parametrize("kind", ["column", "row"])
def test_time_line(benchmark: BenchmarkFixture, link: SlowLink, kind: str) -> None:
    picture = write(link, kind, Path("out/overlap", kind))
    print(f"\ntime line of {kind} forward: {picture}, and as a trace for chrome://tracing beside it")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # recorded above, on the ranks
