"""Pose as any rank of a large world, in one process: torch's fake process group moves no data.

>>> [dist.get_rank() for rank in each_rank(4)]
[0, 1, 2, 3]
>>> with fake_rank(1000, 2048):
...     dist.get_rank(), dist.get_world_size()
(1000, 2048)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import join_world, leave_world
from tpkernels.groups.plan import plan_groups
from tpkernels.groups.state import ParallelState


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be this rank inside the `with` block; afterwards all groups made inside are gone."""
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank below the world size of {world_size}, got {rank}")
    if dist.is_initialized():
        raise RuntimeError(
            f"cannot pose as rank {rank} of {world_size}: already rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; destroy that process group first"
        )
    join_world("fake", FakeStore(), rank, world_size)
    try:
        yield
    finally:
        leave_world()


def each_rank(world_size: int, ranks: Iterable[int] | None = None) -> Iterator[int]:
    """Be one rank after the other, all of them or those in `ranks`; yields the rank.

    To be written in the `for` statement itself: then leaving the loop early, by `break` or by an exception,
    drops the generator, which ends the `with` block at once.
    """
    for rank in range(world_size) if ranks is None else ranks:
        with fake_rank(rank, world_size):
            yield rank


def pretend(world: int, tp: int, pp: int, virtual: int | None, split: int | None, rank: int) -> ParallelState:
    """A state without process groups: enough for every answer that is arithmetic."""
    plan = plan_groups(world_size=world, tensor=tp, pipeline=pp, virtual_pipeline=virtual, split_rank=split)
    return ParallelState(rank=rank, plan=plan, process_groups={})
