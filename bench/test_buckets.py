"""Gradient buckets against DDP and a loop of all-reduces: gloo ranks, interleaved rounds, ratios."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.cases.buckets import (
    bytes_on_the_wire,
    time_construction,
    time_hooks,
    time_lists,
    time_steps,
    time_steps_apart,
)
from bench.measure import Comparison, slowest
from tests.ranks import RankPool

Seconds = dict[str, list[float]]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


def report(benchmark: BenchmarkFixture, title: str, seconds: Seconds, ours: str, other: str) -> float:
    comparison = Comparison(seconds[ours], seconds[other])
    benchmark.extra_info.update(
        {f"{ours}/{other} {key}": value for key, value in comparison.as_info().items()}
    )
    print(f"\n{title}: {ours} against {other}: {comparison}")
    return comparison.ratio


@pytest.mark.benchmark(group="forward, backward, reduction")
@pytest.mark.parametrize("list_name", ["gpt2_small", "400_small"])
def test_step(benchmark: BenchmarkFixture, ranks: RankPool, list_name: str) -> None:
    world = ranks.world_size
    large = list_name == "gpt2_small"
    # four ranks with all ways would need 20 GB
    names = ["cpp", "ddp"] if large and world == 4 else ["cpp", "python", "ddp", "ddp_views", "loop"]
    rounds = (7 if world == 4 else 15) if large else 60
    seconds = slowest(ranks.run(time_steps, list_name, names, rounds, timeout=500))
    for ours in {"cpp", "python"} & set(names):
        for other in names:
            if other not in ("cpp", "python"):
                report(benchmark, f"step, {list_name}, {world} ranks", seconds, ours, other)
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # timed above, on the ranks


@pytest.mark.benchmark(group="forward, backward, reduction; processes apart")
@pytest.mark.parametrize("world", [2, 4])
def test_step_apart(benchmark: BenchmarkFixture, world: int) -> None:
    names = ["cpp", "ddp", "ddp_views"] if world == 2 else ["cpp", "ddp"]
    with RankPool(world * len(names)) as pool:
        answers = pool.run(time_steps_apart, "gpt2_small", names, 11, timeout=500)
    seconds = {
        name: [max(times) for times in zip(*(taken for way, taken, _ in answers if way == name), strict=True)]
        for name in names
    }
    for other in names[1:]:
        report(benchmark, f"step, gpt2_small, {world} ranks apart", seconds, "cpp", other)
    print(
        {name: max(faults for way, _, faults in answers if way == name) for name in names},
        "page faults a step",
    )
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # timed above, on the ranks


@pytest.mark.benchmark(group="all-reduce of a list")
def test_list(benchmark: BenchmarkFixture, ranks: RankPool) -> None:
    seconds = slowest(ranks.run(time_lists, "400_small", 40, timeout=300))
    for ours in ("bucketed", "unchecked"):
        ratio = report(benchmark, f"list, 400_small, {ranks.world_size} ranks", seconds, ours, "loop")
        assert ratio > 1
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]


@pytest.mark.benchmark(group="construction, 400 parameters")
def test_construction(benchmark: BenchmarkFixture, ranks: RankPool) -> None:
    seconds = slowest(ranks.run(time_construction, 20, timeout=200))
    for ours in ("cpp", "python"):
        report(benchmark, f"construction, {ranks.world_size} ranks", seconds, ours, "ddp")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]


@pytest.mark.benchmark(group="hooks, 400 parameters")
def test_hooks(benchmark: BenchmarkFixture, ranks: RankPool) -> None:
    seconds = slowest(ranks.run(time_hooks, 60, timeout=200))
    for ours in ("cpp", "python"):
        report(benchmark, f"accumulation, {ranks.world_size} ranks", seconds, ours, "none")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]


@pytest.mark.benchmark(group="bytes on the wire")
@pytest.mark.parametrize("list_name", ["gpt2_small", "400_small"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bytes(
    benchmark: BenchmarkFixture, ranks: RankPool, list_name: str, wire_dtype: torch.dtype | None
) -> None:
    if ranks.world_size == 4:
        pytest.skip("each rank brings the same bytes for any number of ranks")
    sent, gradients, collectives = ranks.run(bytes_on_the_wire, list_name, wire_dtype, timeout=100)[0]
    benchmark.extra_info.update(sent=sent, gradients=gradients, collectives=collectives)
    print(
        f"\n{list_name}, {wire_dtype}: {sent} bytes in {collectives} collectives; gradients {gradients} bytes"
    )
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]
