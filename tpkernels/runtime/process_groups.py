"""Creates the process groups of a plan: each rank those that it belongs to, each group once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

from torch.distributed import ProcessGroup

from tpkernels.messages import cause_of
from tpkernels.runtime import c10d
from tpkernels.runtime.state import ParallelStateError
from tpkernels.topology.groups import Ranks
from tpkernels.topology.plan import KINDS, GroupPlan, Kind


class ProcessGroups(Mapping[Kind, ProcessGroup]):
    """The process groups of one rank by kind; kinds with equal ranks share one.

    A group of this rank alone is seldom used, and is created when it is first looked up.
    """

    def __init__(self, first_alike: Mapping[Kind, Kind]) -> None:
        self._first_alike = first_alike  # only kinds with a group that this rank is in
        self._process = os.getpid()
        self._lock = Lock()  # autograd's threads may be the first to ask for a group
        self.made: dict[Kind, ProcessGroup] = {}
        self.to_make: dict[Kind, Callable[[], ProcessGroup]] = {}
        self.destroyed = False

    def __getitem__(self, kind: Kind) -> ProcessGroup:
        first = self._first_alike[kind]
        if self.destroyed:
            raise ParallelStateError(
                f"the {kind} group was destroyed with its parallel state; "
                "call initialize_model_parallel(...) again, and ask the new state"
            )
        if self._process != os.getpid():
            raise ParallelStateError(
                f"the {kind} group belongs to process {self._process}: a forked child cannot use it; "
                "start processes by spawn, and initialize in each"
            )
        with self._lock:
            if first not in self.made:
                self.made[first] = self.to_make[first]()
            return self.made[first]

    def __contains__(self, kind: object) -> bool:
        return kind in self._first_alike  # Mapping's own would make the group to find out

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._first_alike)

    def __len__(self) -> int:
        return len(self._first_alike)


def create_process_groups(
    plan: GroupPlan,
    rank: int,
    *,
    call: int,
    timeout: timedelta | None,
    backend: str | None,
    options: Mapping[Kind, Any],
    kinds: Sequence[Kind] = KINDS,
) -> ProcessGroups:
    """Create the process groups of `rank`, in the same order of kinds on every rank.

    call: a number that no earlier call in this world had; part of the groups' names

    A group of all ranks is the default group itself, as in torch's DeviceMesh, unless it has another
    time-out, backend or options: a second communicator over the world is the most expensive one.
    """
    first_alike = kinds_alike(plan, options, kinds)
    groups = ProcessGroups({kind: first for kind, first in first_alike.items() if plan.is_member(rank, kind)})
    everyone = c10d.splits_the_world(backend)
    for kind in dict.fromkeys(first_alike.values()):
        ranks = plan.members_near(rank, kind)
        make = partial(_make, kind, ranks, call=call, timeout=timeout, backend=backend, options=options)
        if rank not in ranks:
            if everyone:
                c10d.stand_aside()
        elif len(ranks) == plan.world_size and timeout is None and backend is None and kind not in options:
            groups.made[kind] = c10d.default_group()
        elif len(ranks) == 1 and not everyone:
            groups.to_make[kind] = make
        else:
            try:
                groups.made[kind] = make()
            except Exception as error:
                destroy_process_groups(groups)
                raise ParallelStateError(
                    f"rank {rank} could not create the {kind} group {list(ranks)}: {cause_of(error)}"
                ) from error
    return groups


def kinds_alike(
    plan: GroupPlan, options: Mapping[Kind, Any], kinds: Sequence[Kind] = KINDS
) -> dict[Kind, Kind]:
    """Map each kind to the first kind with the same groups; a kind with its own options to itself.

    Rank 0, which is in a group of every kind, decides for all ranks, members or not: they take part in the
    same creations. Embedding kinds come last: some ranks are in no such group, so no other kind can share
    theirs.
    """
    alike: dict[Kind, Kind] = {}
    seen: dict[Ranks, Kind] = {}
    for kind in sorted(kinds, key=lambda kind: "embedding" in kind):
        alike[kind] = kind if kind in options else seen.setdefault(plan.members_near(0, kind), kind)
    return alike


def destroy_process_groups(groups: ProcessGroups) -> None:
    """Destroy each group once, the last made first; not the default group, which belongs to the caller."""
    for group in reversed(list(groups.made.values())):
        if not c10d.is_default(group):
            c10d.destroy_group(group)
    groups.destroyed = True
    # A group that is still referenced keeps its threads, and one of them may outlive the interpreter.
    groups.made.clear()
    groups.to_make.clear()


def _make(
    kind: Kind,
    ranks: Ranks,
    *,
    call: int,
    timeout: timedelta | None,
    backend: str | None,
    options: Mapping[Kind, Any],
) -> ProcessGroup:
    timeout = timeout or c10d.default_timeout()
    return c10d.new_group(
        ranks,
        name=f"tpkernels/{call}/{kind}/{ranks[0]}",
        description=f"tpkernels {kind}",
        timeout=timeout,
        backend=backend,
        options=_options(kind, backend, timeout, options),
    )


def _options(kind: Kind, backend: str | None, timeout: timedelta, options: Mapping[Kind, Any]) -> Any:
    """The caller's options, copied since torch writes into them; else those of this kind by default."""
    if kind in options:
        return deepcopy(options[kind])
    return c10d.options_beside_products(backend, timeout) if kind == "tp" else None
