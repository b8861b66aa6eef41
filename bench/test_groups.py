"""Planning and making groups, against loops over every group of the world."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.case import Work
from bench.cases.groups import initialization, loop_groups
from bench.measure import Seconds, interleave, seconds_of_processor, slowest
from tests.ranks import RankPool
from tpkernels.groups.plan import KINDS, plan_groups

WORLD, TENSOR, PIPELINE, RANK = 131_072, 8, 16, 77_777
Record = Callable[[Work, Seconds], None]


def plan_one_rank() -> list[tuple[int, ...]]:
    plan = plan_groups(world_size=WORLD, tensor=TENSOR, pipeline=PIPELINE)
    return [plan.group_of(RANK, kind) for kind in KINDS if plan.is_member(RANK, kind)]


def list_every_group() -> list[list[int]]:
    return [ranks for _, ranks in loop_groups(WORLD, TENSOR, PIPELINE) if RANK in ranks]


@pytest.mark.smoke
def test_plan_of_a_huge_world(record: Record) -> None:
    found = {tuple(ranks) for ranks in list_every_group()}
    assert found <= set(plan_one_rank())  # right before quick
    ways = {"ours": plan_one_rank, "naive": list_every_group}
    record(_work(f"tp{TENSOR}-pp{PIPELINE}", WORLD, "plan"), interleave(ways, 11, seconds_of_processor(1)))


@pytest.mark.smoke
def test_initialization_of_two_ranks(record: Record, ranks2: RankPool) -> None:
    seconds = slowest(ranks2.run(initialization, 2, 1, 31, timeout=200))
    record(_work("tp2-pp1", 2, "initialization"), seconds)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), (8, 1), (2, 4), (1, 1)])
def test_initialization(record: Record, ranks8: RankPool, tensor: int, pipeline: int) -> None:
    seconds = slowest(ranks8.run(initialization, tensor, pipeline, 15, timeout=200))
    record(_work(f"tp{tensor}-pp{pipeline}", 8, "initialization"), seconds)


def _work(sizes: str, world: int, pass_: str) -> Work:
    return Work(
        op="groups",
        shape=f"{sizes}-world{world}",
        pass_=pass_,
        naive="loops over every group",
        world=world,
        wire_bytes=None,
        backend="gloo",
    )
