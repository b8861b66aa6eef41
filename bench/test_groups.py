"""Planning and making groups, against loops over every group of the world."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from bench.cases.groups import initialize_by_loops, loop_groups
from bench.measure import Comparison, compare
from tests.ranks import RankPool
from tpkernels.runtime.initialize import destroy_model_parallel, initialize_model_parallel
from tpkernels.topology.plan import KINDS, plan_groups

WORLD, TENSOR, PIPELINE, RANK = 131_072, 8, 16, 77_777


def plan_one_rank() -> list[tuple[int, ...]]:
    plan = plan_groups(world_size=WORLD, tensor=TENSOR, pipeline=PIPELINE)
    return [plan.group_of(RANK, kind) for kind in KINDS if plan.is_member(RANK, kind)]


def list_every_group() -> list[list[int]]:
    return [ranks for _, ranks in loop_groups(WORLD, TENSOR, PIPELINE) if RANK in ranks]


@pytest.mark.benchmark(group="plan: one rank's groups in a world of 131,072")
def test_plan_of_a_huge_world(benchmark: BenchmarkFixture) -> None:
    found = {tuple(ranks) for ranks in list_every_group()}
    assert found <= set(plan_one_rank())  # right before quick
    comparison = compare(plan_one_rank, list_every_group, rounds=7)
    benchmark.extra_info.update(comparison.as_info())
    print(f"\nplan of {WORLD} ranks: {comparison}")
    benchmark(plan_one_rank)


def forget_loops() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def time_both(tensor: int, pipeline: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of our way and of the loops, round by round, on this rank."""
    ways: dict[Callable[[int, int], object], Callable[[], None]] = {
        initialize_model_parallel: destroy_model_parallel,
        initialize_by_loops: forget_loops,
    }
    seconds: list[tuple[float, float]] = []
    for round_ in range(rounds + 1):
        taken = {}
        for make in sorted(ways, key=lambda way: way.__name__, reverse=round_ % 2 == 0):
            dist.barrier()
            start = time.perf_counter()
            make(tensor, pipeline)
            dist.barrier()  # made only when the slowest rank has made its groups
            taken[make] = time.perf_counter() - start
            ways[make]()
        seconds.append((taken[initialize_model_parallel], taken[initialize_by_loops]))
    return seconds[1:]  # the first round warms up


def worst_rank(by_rank: list[list[tuple[float, float]]]) -> Comparison:
    rounds = [list(zip(*ranks, strict=True)) for ranks in zip(*by_rank, strict=True)]
    return Comparison([max(ours) for ours, _ in rounds], [max(naive) for _, naive in rounds])


@pytest.fixture(scope="module")
def ranks8() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), (8, 1), (2, 4), (1, 1)])
@pytest.mark.benchmark(group="initialization: 8 gloo ranks")
def test_initialization(benchmark: BenchmarkFixture, ranks8: RankPool, tensor: int, pipeline: int) -> None:
    comparison = worst_rank(ranks8.run(time_both, tensor, pipeline, 15, timeout=200))
    benchmark.extra_info.update(comparison.as_info())
    print(f"\ntensor {tensor}, pipeline {pipeline}: {comparison}")
    benchmark.pedantic(lambda: ranks8.run(time_both, tensor, pipeline, 1, timeout=60), rounds=3)  # type: ignore[no-untyped-call]
