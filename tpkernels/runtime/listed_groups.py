"""Process groups of listed ranks, created by their members alone.

`create_process_groups` makes the groups of a plan over the whole world. These are of any ranks: Megatron's
instances of an optimizer, a grid over half of the world, a second communicator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.messages import cause_of
from tpkernels.runtime import c10d
from tpkernels.runtime.initialize import agree, digest, meet
from tpkernels.runtime.state import ParallelStateError
from tpkernels.topology.groups import Ranks
from tpkernels.topology.sizes import InvalidSizes


@dataclass(frozen=True)
class Listed:
    """Groups without a common rank, their backend and its options."""

    groups: Sequence[Sequence[int]]
    backend: str | None = None
    options: Any = None


def create_listed_groups(
    wanted: Mapping[str, Listed],
    *,
    what: str = "groups of listed ranks",
    timeout: timedelta | None = None,
) -> dict[str, ProcessGroup]:
    """Create process groups; return by name those that this rank is in, each with its own communicator.

    Every rank of `wanted` calls it with the same lists and names, in the same order as its other calls for
    these ranks; of other ranks only those that share a split communicator (`init_process_group(device_id=)`).
    """
    lists = {name: tuple(tuple(sorted(ranks)) for ranks in its.groups) for name, its in wanted.items()}
    everyone = dist.is_initialized() and any(c10d.splits_the_world(its.backend) for its in wanted.values())
    members = _members(lists.values(), dist.get_world_size() if dist.is_initialized() else 0)
    if dist.is_initialized() and not everyone and dist.get_rank() not in members:
        return {}
    backends = {name: its.backend for name, its in wanted.items() if its.backend}
    request = f"{what} {', '.join(lists)} ({digest(sorted(lists.items()))}, {backends or 'default backend'})"
    among = None if everyone or not members else members
    call = agree(request, timeout, among)
    _check(lists, dist.get_world_size())
    made: dict[str, ProcessGroup] = {}
    problem = ""
    try:
        for name, its in wanted.items():
            ranks = next((ranks for ranks in lists[name] if dist.get_rank() in ranks), None)
            if ranks is not None:
                made[name] = c10d.new_group(
                    ranks,
                    name=f"tpkernels/{digest(among)}/{call}/{name}/{ranks[0]}",
                    description=f"tpkernels {name}",
                    timeout=timeout or c10d.default_timeout(),
                    backend=its.backend,
                    options=deepcopy(its.options),  # torch writes name, ranks and time-out into it
                )
            elif c10d.splits_the_world(its.backend):
                c10d.stand_aside()
    except Exception as error:
        problem = f"rank {dist.get_rank()} could not make {what}: {cause_of(error)}"
    try:
        meet(request, call, problem, timeout, among)
    except ParallelStateError:
        destroy_listed_groups(made)
        raise
    return made


def destroy_listed_groups(made: Mapping[str, ProcessGroup]) -> None:
    """Destroy groups of `create_listed_groups`, the last made first."""
    for group in reversed(list(made.values())):
        c10d.destroy_group(group)


def _members(lists: Iterable[tuple[Ranks, ...]], world_size: int) -> Ranks:
    """Ranks within the world; `_check` validates all after agreement."""
    named = {rank for groups in lists for ranks in groups for rank in ranks}
    return tuple(sorted(rank for rank in named if 0 <= rank < world_size))


def _check(lists: Mapping[str, tuple[Ranks, ...]], world_size: int) -> None:
    for name, groups in lists.items():
        ranks = [rank for group in groups for rank in group]
        if len(set(ranks)) < len(ranks):
            raise InvalidSizes(f"{name}: expected groups that have no rank in common, got {groups}")
        if not all(groups) or not all(0 <= rank < world_size for rank in ranks):
            raise InvalidSizes(f"{name}: expected groups of ranks 0 to {world_size - 1}, got {groups}")
