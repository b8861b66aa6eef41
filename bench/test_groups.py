"""Planning groups, against loops over every group of the world."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.case import Case, Work
from bench.conftest import Bench
from tpkernels.groups.kinds import GroupKind
from tpkernels.groups.plan import plan_groups

WORLD, TENSOR, PIPELINE, RANK = 131_072, 8, 16, 77_777


def loop_groups(world_size: int, tensor: int, pipeline: int) -> Iterator[tuple[str, list[int]]]:
    """Kind and ranks of each group that the loops create, in their order."""
    stage = world_size // pipeline
    data = stage // tensor
    data_groups = [
        list(range(p * stage + t, (p + 1) * stage, tensor)) for p in range(pipeline) for t in range(tensor)
    ]
    yield from (("dp", ranks) for ranks in data_groups)
    yield from (("model", [ranks[i] for ranks in data_groups]) for i in range(data))
    for first in range(0, world_size, tensor):
        yield "tp", list(range(first, first + tensor))
    for first in range(stage):
        ranks = list(range(first, world_size, stage))
        yield "pp", ranks
        yield "embedding", sorted({ranks[0], ranks[-1]})
        yield "position_embedding", ranks[:1]


LOOPED: tuple[GroupKind, ...] = ("dp", "model", "tp", "pp", "embedding", "position_embedding")


def plan_one_rank() -> list[Tensor]:
    plan = plan_groups(world_size=WORLD, tensor=TENSOR, pipeline=PIPELINE)
    return [torch.tensor(plan.group_of(RANK, kind)) for kind in LOOPED if plan.is_member(RANK, kind)]


def list_every_group() -> list[Tensor]:
    groups = {kind: ranks for kind, ranks in loop_groups(WORLD, TENSOR, PIPELINE) if RANK in ranks}
    return [torch.tensor(groups[kind]) for kind in LOOPED if kind in groups]


@pytest.mark.smoke
def test_plan_of_a_huge_world(bench: Bench) -> None:
    """One process plans, for all ranks."""
    work = Work(
        op="groups",
        shape=f"tp{TENSOR}-pp{PIPELINE}-world{WORLD}",
        pass_="plan",
        naive="loops over every group",
        wire_bytes=None,
        backend="gloo",
    )
    bench.case(Case(work, {"ours": plan_one_rank, "naive": list_every_group}), 11)
