"""Megatron's functions that make groups of listed ranks, and change their time-outs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.interop.megatron_core.rank_lists import hierarchy, hybrid_sizes
from tpkernels.runtime import c10d
from tpkernels.runtime.listed_groups import Listed, create_listed_groups
from tpkernels.runtime.state import current_or_none

__all__ = ["create_group", "create_hierarchical_groups", "create_hybrid_dp_cp_groups", "update_pg_timeout"]


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup | object:
    """A group of `ranks`, by default all; on other ranks torch's `GroupMember.NON_GROUP_MEMBER`.

    use_local_synchronization: no effect: members make it, and the others may or may not call
    """
    members = range(dist.get_world_size()) if ranks is None else ranks
    name = group_desc or "group"
    made = create_listed_groups(
        {name: Listed([members], backend, pg_options)}, what="create_group", timeout=timeout
    )
    return made.get(name, dist.GroupMember.NON_GROUP_MEMBER)


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup | None]]:
    """This rank's groups by level, neighbours first, and their twins by gloo; empty on other ranks.

    rank: not looked at: it is this process's
    """
    levels = hierarchy(ranks, hierarchical_group_sizes)
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(levels)
    wanted = {f"{group_desc} {i}": Listed(groups, None, options[i]) for i, groups in enumerate(levels)}
    if create_gloo_process_groups:
        wanted |= {f"{group_desc} {i} gloo": Listed(groups, "gloo") for i, groups in enumerate(levels)}
    made = create_listed_groups(wanted, what="create_hierarchical_groups", timeout=timeout)
    at = range(len(levels) if made else 0)
    return [made[f"{group_desc} {i}"] for i in at], [made.get(f"{group_desc} {i} gloo") for i in at]


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, ProcessGroup]:
    """This rank's group of each power of two of neighbours, by size. rank: not looked at"""
    wanted = {
        str(size): Listed([ranks[i : i + size] for i in range(0, len(ranks), size)], None, pg_options)
        for size in hybrid_sizes(len(ranks))
    }
    if not wanted:
        return {}
    made = create_listed_groups(wanted, what="create_hybrid_dp_cp_groups")
    return {int(size): group for size, group in made.items()}


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Change the time-out of a group, by default of all groups of the parallel state, after a barrier."""
    state = current_or_none()
    dist.barrier(pg)
    groups = [pg] if pg is not None else [c10d.default_group()]
    if pg is None and state is not None:
        groups += [*state.process_groups.values(), *state.further.values()]
    for group in dict.fromkeys(groups):
        c10d.set_timeout(group, timeout)
