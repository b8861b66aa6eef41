"""Initializes model parallelism: ranks agree on sizes, check them, and create process groups.

Groups are those of a plan over the world, or of listed ranks, such as Megatron's instances of an optimizer
or a second communicator. Each rank makes the groups that it belongs to, each once.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.errors import cause_of
from tpkernels.groups import c10d
from tpkernels.groups.agreement import agree, digest, is_timeout, meet
from tpkernels.groups.kinds import Ranks
from tpkernels.groups.plan import KINDS, GroupKind, GroupPlan, plan_groups
from tpkernels.groups.sizes import DEFAULT_ORDER, InvalidSizes
from tpkernels.groups.state import (
    ParallelState,
    ParallelStateError,
    call_at_destroy,
    current_or_none,
    install,
    uninstall,
)


class ProcessGroups(Mapping[GroupKind, ProcessGroup]):
    """The process groups of one rank by kind; kinds with equal ranks share one.

    A group of this rank alone is seldom used, and is created at its first look-up.
    """

    def __init__(self, first_alike: Mapping[GroupKind, GroupKind]) -> None:
        self._first_alike = first_alike  # only kinds with a group that this rank is in
        self._process = os.getpid()
        self._lock = Lock()  # autograd's threads may be the first to look up a group
        self.made: dict[GroupKind, ProcessGroup] = {}
        self.to_make: dict[GroupKind, Callable[[], ProcessGroup]] = {}
        self.destroyed = False

    def __getitem__(self, kind: GroupKind) -> ProcessGroup:
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

    def __iter__(self) -> Iterator[GroupKind]:
        return iter(self._first_alike)

    def __len__(self) -> int:
        return len(self._first_alike)


@dataclass(frozen=True)
class GroupSettings:
    """Settings for the groups of a plan, as for `initialize_model_parallel`.

    options: of a backend, by kind
    kinds: the kinds of groups to make
    """

    timeout: timedelta | None = None
    backend: str | None = None
    options: Mapping[GroupKind, Any] | None = None
    kinds: Sequence[GroupKind] = KINDS

    def require_valid(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {self.timeout!r}")
        if self.timeout is not None and not is_timeout(self.timeout):
            raise ValueError(f"timeout must be positive, got {self.timeout!r}")
        for kind in self.options or {}:
            if kind not in self.kinds:
                known = ", ".join(self.kinds)
                raise ValueError(f"group_options has an unknown kind {kind!r}; known are {known}")


def create_process_groups(plan: GroupPlan, rank: int, call: int, settings: GroupSettings) -> ProcessGroups:
    """Create the process groups of `rank`, in the same order of kinds on every rank.

    call: a number unique to this call in this world; part of the groups' names

    A group of all ranks is the default group itself, as in torch's DeviceMesh, unless it has another
    time-out, backend or options: a second communicator over the world is expensive.
    """
    options = settings.options or {}
    as_default = settings.timeout is None and settings.backend is None
    first_alike = kinds_alike(plan, options, settings.kinds)
    groups = ProcessGroups({kind: first for kind, first in first_alike.items() if plan.is_member(rank, kind)})
    everyone = c10d.splits_the_world(settings.backend)
    for kind in dict.fromkeys(first_alike.values()):
        ranks = plan.members_near(rank, kind)
        make = partial(_make, kind, ranks, call, settings)
        if rank not in ranks:
            if everyone:
                c10d.stand_aside()
        elif len(ranks) == plan.world_size and as_default and kind not in options:
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
    plan: GroupPlan, options: Mapping[GroupKind, Any], kinds: Sequence[GroupKind] = KINDS
) -> dict[GroupKind, GroupKind]:
    """Map each kind to the first kind with the same groups, and a kind with its own options to itself.

    Rank 0's groups decide for all ranks, members or not, because all take part in the same creations; rank 0
    has a group of every kind. Embedding kinds come last: some ranks are in no such group, so no other kind
    can share it.
    """
    alike: dict[GroupKind, GroupKind] = {}
    seen: dict[Ranks, GroupKind] = {}
    for kind in sorted(kinds, key=lambda kind: "embedding" in kind):
        alike[kind] = kind if kind in options else seen.setdefault(plan.members_near(0, kind), kind)
    return alike


def destroy_process_groups(groups: ProcessGroups) -> None:
    """Destroy the groups that were made."""
    destroy_groups(groups.made)
    groups.destroyed = True
    # A group that is still referenced keeps its threads, and one of them may outlive the interpreter.
    groups.made.clear()
    groups.to_make.clear()


def destroy_groups(made: Mapping[Any, ProcessGroup]) -> None:
    """Destroy each group once, the last made first; not the default group, which belongs to the caller."""
    for group in reversed(list(made.values())):
        if not c10d.is_default(group):
            c10d.destroy_group(group)


def _make(kind: GroupKind, ranks: Ranks, call: int, settings: GroupSettings) -> ProcessGroup:
    timeout, given = settings.timeout or c10d.default_timeout(), settings.options or {}
    options = deepcopy(given.get(kind))  # torch writes into it
    if kind == "tp" and kind not in given:
        options = c10d.options_beside_products(settings.backend, timeout)
    return c10d.new_group(
        ranks,
        name=f"tpkernels/{call}/{kind}/{ranks[0]}",
        description=f"tpkernels {kind}",
        timeout=timeout,
        backend=settings.backend,
        options=options,
    )


@dataclass(frozen=True)
class Listed:
    """Disjoint groups of ranks, their backend and its options."""

    groups: Sequence[Sequence[int]]
    backend: str | None = None
    options: Any = None


def create_listed_groups(
    wanted: Mapping[str, Listed],
    *,
    what: str = "groups of listed ranks",
    timeout: timedelta | None = None,
) -> dict[str, ProcessGroup]:
    """Create process groups, each with its own communicator; return this rank's groups by name.

    Called by every listed rank with the same lists and names, in the same order as its other calls for these
    ranks. Other ranks must call only if communicators are split (`init_process_group(device_id=)`).
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
        destroy_groups(made)
        raise
    return made


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


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    order: str = DEFAULT_ORDER,
    timeout: timedelta | None = None,
    backend: str | None = None,
    group_options: Mapping[GroupKind, Any] | None = None,
) -> ParallelState:
    """Split the world into groups and install them as this process's parallel state.

    Called by all ranks with the same arguments, after `torch.distributed.init_process_group`. If ranks
    disagree, all raise the same error with the arguments of two of them.

    virtual_pipeline_model_parallel_size: interleaved stages on each rank; needs 2 or more pipeline stages
    pipeline_model_parallel_split_rank: the first stage of the decoder, in a model with an encoder, too
    order: axes from the fastest varying to the slowest
    timeout: for the agreement and for every group's collectives; default: the default process group's
    backend: of every group; default: the default process group's
    group_options: backend options by kind, such as {"tp": ProcessGroupNCCL.Options(...)} for high-priority
        streams; a kind with options shares no communicator with other kinds or the default group. By default
        NCCL's tensor groups get such a stream and at most 16 blocks; {"tp": None}: NCCL's own options
    """
    request = as_text(initialize_model_parallel, locals())
    plan = partial(
        plan_groups,
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
        expert=expert_model_parallel_size,
        virtual_pipeline=virtual_pipeline_model_parallel_size,
        split_rank=pipeline_model_parallel_split_rank,
        order=order,
    )
    return agree_and_create(request, plan, GroupSettings(timeout, backend, group_options))


def agree_and_create(request: str, plan: Callable[..., GroupPlan], settings: GroupSettings) -> ParallelState:
    """Agree on `request`, check it by making the plan, create the groups and install the state.

    plan: called with the keyword `world_size`
    """
    if current_or_none() is not None:
        request += " while its model parallel groups are already initialized"
    # before any check, so that all ranks raise if one has a bad argument
    call = agree(request, settings.timeout)
    if current_or_none() is not None:
        raise ParallelStateError(
            "model parallel groups are already initialized: call destroy_model_parallel() first, or "
            "create_parallel_state(plan) for a second state"
        )
    state = _create(plan(world_size=dist.get_world_size()), request, call, settings)
    install(state)
    return state


def create_parallel_state(
    plan: GroupPlan,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    group_options: Mapping[GroupKind, Any] | None = None,
) -> ParallelState:
    """Make the process groups of `plan` as a second state, to pass to layers or to enter by `use(state)`.

    Called by all ranks with an equal plan. `destroy_parallel_state(state)` destroys the groups.
    """
    request = as_text(create_parallel_state, locals())
    call = agree(request, timeout)
    if not isinstance(plan, GroupPlan):
        raise TypeError(f"plan: expected a GroupPlan, as plan_groups(...) makes it, got {plan!r}")
    if plan.world_size != dist.get_world_size():
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but this world has {dist.get_world_size()}"
        )
    return _create(plan, request, call, GroupSettings(timeout, backend, group_options))


def destroy_model_parallel() -> None:
    """Destroy the groups of the current state and remove the state. Harmless without a state."""
    state = current_or_none()
    uninstall()
    call_at_destroy()
    if state is not None:
        destroy_parallel_state(state)


def destroy_parallel_state(state: ParallelState) -> None:
    """Destroy the process groups of `state`."""
    destroy_groups(state.further)
    if isinstance(state.process_groups, ProcessGroups):  # not a caller's own groups
        destroy_process_groups(state.process_groups)


def _create(plan: GroupPlan, request: str, call: int, settings: GroupSettings) -> ParallelState:
    settings.require_valid()
    rank = dist.get_rank()
    groups, problem = None, ""
    try:
        groups = create_process_groups(plan, rank, call, settings)
    except ParallelStateError as error:
        problem = str(error)
    try:
        # A rank that continues, perhaps to the end of a short program, would break connections that slower
        # ranks are still making. If one rank has failed, all raise.
        meet(request, call, problem, settings.timeout)
    except ParallelStateError:
        if groups is not None:
            destroy_process_groups(groups)
        raise
    assert groups is not None, "without groups there is a problem, hence an error"
    return ParallelState(rank=rank, plan=plan, process_groups=groups)


def as_text(function: Callable[..., object], given: Mapping[str, object]) -> str:
    """Format a call as text, the same on all ranks, without arguments that have default values."""
    said = [
        f"{name}={canonical(given[name])!r}"
        for name, parameter in inspect.signature(function).parameters.items()
        if repr(canonical(given[name])) != repr(parameter.default)
    ]
    return f"{function.__name__}({', '.join(said)})"


def canonical(value: object) -> object:
    """Convert a value so that its text is the same on all ranks.

    Other libraries' integers become Python's, functions their names, mappings their keys.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, Mapping):
        return sorted(map(repr, value)) or None
    return getattr(value, "__qualname__", "a function") if callable(value) else value
