"""How much of communication is hidden, on a link as slow as the computation. Needs root and iproute2."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.case import Measured
from bench.cases import bucket_overlap
from bench.cases.linear_overlap import listed, measure
from bench.conftest import Bench
from bench.slow_link import SlowLink, why_not


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    if reason := why_not():
        pytest.skip(reason)
    with SlowLink(bits_per_second=1e9) as link:
        yield link


@pytest.mark.parametrize("megabits", [200, 400, 800])
def test_gradient_buckets(link: SlowLink, bench: Bench, megabits: float) -> None:
    work, seconds = link.run(bucket_overlap.measure, megabits, timeout=300)[0]
    print(f"\n{work}: {bucket_overlap.listed(seconds)}; load {os.getloadavg()[0]:.1f}")
    bench.record(Measured(work, seconds))


@pytest.mark.parametrize("megabits", [100, 150, 200, 300])
@pytest.mark.parametrize(
    "case",
    ["column forward", "row forward", "column backward", "row backward"],
    ids=lambda c: c.replace(" ", "_"),
)
def test_linear(link: SlowLink, bench: Bench, case: str, megabits: float) -> None:
    work, seconds = link.run(measure, case, megabits, timeout=300)[0]
    print(f"\n{case}: {listed(seconds)}")
    bench.record(Measured(work, seconds))
