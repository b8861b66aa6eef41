"""A plan turned into process groups: each rank makes only the groups that it belongs to, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup

from tpkernels.runtime import c10d
from tpkernels.runtime.state import ParallelStateError
from tpkernels.topology.plan import KINDS, GroupPlan, Kind


def create_process_groups(
    plan: GroupPlan,
    rank: int,
    *,
    call: int,
    timeout: timedelta,
    backend: str | None,
    options: Mapping[Kind, Any],
) -> dict[Kind, ProcessGroup]:
    """The process groups of `rank` by kind, made in the same order of kinds on every rank.

    call: a number that no earlier call in this world had; it makes the groups' names new, too.
    """
    groups: dict[Kind, ProcessGroup] = {}
    first_alike = kinds_alike(plan, options)
    everyone = c10d.splits_the_world()
    for kind in KINDS:
        is_member = plan.is_member(rank, kind)
        if first_alike[kind] != kind:
            if is_member:
                groups[kind] = groups[first_alike[kind]]
            continue
        if not (is_member or everyone):
            continue
        ranks = plan.members_near(rank, kind)
        try:
            group = c10d.new_group(
                ranks,
                name=f"tpkernels/{call}/{kind}/{ranks[0]}",
                description=f"tpkernels {kind}",
                timeout=timeout,
                backend=backend,
                options=options.get(kind),
            )
        except Exception as error:
            destroy_process_groups(groups.values())
            raise ParallelStateError(
                f"rank {rank} could not create the {kind} group {list(ranks)}: {error}"
            ) from error
        if group is not None:
            groups[kind] = group
    return groups


def kinds_alike(plan: GroupPlan, options: Mapping[Kind, Any]) -> dict[Kind, Kind]:
    """For each kind the first kind whose groups, and options, are the same.

    Judged at rank 0, which is in a group of every kind: so all ranks share the same kinds, whether or not
    they are members, and take part in the same creations.
    """
    alike: dict[Kind, Kind] = {}
    seen: dict[tuple[tuple[int, ...], int | None], Kind] = {}
    for kind in KINDS:
        own_options = id(options[kind]) if kind in options else None
        alike[kind] = seen.setdefault((plan.group_of(0, kind), own_options), kind)
    return alike


def destroy_process_groups(groups: Iterable[ProcessGroup]) -> None:
    """Destroy each group once, the last made first."""
    for group in reversed(list(dict.fromkeys(groups))):
        c10d.destroy_group(group)
