"""Initializes model parallelism: ranks agree on sizes, check them, and create process groups."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import sha1
from itertools import count
from typing import Any, SupportsIndex, TypeGuard

import torch.distributed as dist
from torch.distributed import PrefixStore

from tpkernels.runtime import c10d
from tpkernels.runtime.agreement import World
from tpkernels.runtime.process_groups import ProcessGroups, create_process_groups, destroy_process_groups
from tpkernels.runtime.state import (
    ParallelState,
    ParallelStateError,
    current_or_none,
    install,
    uninstall,
)
from tpkernels.topology.groups import Ranks
from tpkernels.topology.plan import KINDS, GroupPlan, Kind, plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER
from tpkernels.tp_invariance import mode

_FAKE_CALLS = count(1)


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
    group_options: Mapping[Kind, Any] | None = None,
) -> ParallelState:
    """Split the world into groups and make them this process's parallel state.

    Every rank calls it with the same arguments, after `torch.distributed.init_process_group`. Ranks that
    disagree all raise the same error, which says what two of them asked for.

    virtual_pipeline_model_parallel_size: interleaved stages on each rank; needs 2 or more pipeline stages
    pipeline_model_parallel_split_rank: the first stage of the decoder, in a model that has an encoder too
    order: axes from the fastest varying to the slowest
    timeout: for the agreement and for every group's collectives; default: the default process group's
    backend: of every group; default: the default process group's
    group_options: backend options by kind, such as {"tp": ProcessGroupNCCL.Options(...)} for high-priority
        streams; a kind with options shares no communicator with other kinds or the default group. Without,
        tensor groups of NCCL get such a stream and at most 16 blocks; {"tp": None} leaves all to NCCL
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
    return start(request, plan, timeout, backend, group_options, KINDS)


def start(
    request: str,
    plan: Callable[..., GroupPlan],
    timeout: timedelta | None,
    backend: str | None,
    group_options: Mapping[Kind, Any] | None,
    kinds: Sequence[Kind],
) -> ParallelState:
    """Agree on `request`; then check it, by making the plan; then create groups and install the state.

    plan: of the keyword `world_size`
    """
    if current_or_none() is not None:
        request += " while its model parallel groups are already initialized"
    # before any check, so that all ranks raise if one has a bad argument
    call = agree(request, timeout)
    if current_or_none() is not None:
        raise ParallelStateError(
            "model parallel groups are already initialized: call destroy_model_parallel() first, or "
            "create_parallel_state(plan) for a second state beside this one"
        )
    groups = plan(world_size=dist.get_world_size())
    state = _create(groups, request, call, timeout, backend, group_options, kinds)
    install(state)
    return state


def create_parallel_state(
    plan: GroupPlan,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    group_options: Mapping[Kind, Any] | None = None,
) -> ParallelState:
    """The process groups of `plan` as a second state, to pass to layers or to enter by `use(state)`.

    Every rank calls it with an equal plan. `destroy_parallel_state(state)` destroys the groups.
    """
    request = as_text(create_parallel_state, locals())
    call = agree(request, timeout)
    if not isinstance(plan, GroupPlan):
        raise TypeError(f"plan: expected a GroupPlan, as plan_groups(...) makes it, got {plan!r}")
    if plan.world_size != dist.get_world_size():
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but this world has {dist.get_world_size()}"
        )
    return _create(plan, request, call, timeout, backend, group_options, KINDS)


def destroy_model_parallel() -> None:
    """Destroy the groups of the current state and forget it. Harmless when there is none."""
    state = current_or_none()
    uninstall()
    if state is not None:
        destroy_parallel_state(state)


def destroy_parallel_state(state: ParallelState) -> None:
    """Destroy the process groups of `state`."""
    for group in reversed(list(state.further.values())):
        c10d.destroy_group(group)
    if isinstance(state.process_groups, ProcessGroups):  # not a caller's own groups
        destroy_process_groups(state.process_groups)


def agree(request: str, timeout: timedelta | None, ranks: Ranks | None = None) -> int:
    """Raise unless `ranks`, by default all, make the same request; return a number, new to each call."""
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group(...) first"
        )
    mode.fix("a parallel state")
    if dist.get_backend() == "fake":  # a single process
        return next(_FAKE_CALLS)
    return _world(timeout, ranks).agree(request + mode.described)


def meet(
    request: str, call: int, problem: str, timeout: timedelta | None, ranks: Ranks | None = None
) -> None:
    """Return once `ranks`, by default all, have done what they agreed on. problem: why this one has not"""
    if dist.get_backend() != "fake":
        _world(timeout, ranks).meet(request, call, problem)
    elif problem:
        raise ParallelStateError(problem)


def _world(timeout: timedelta | None, ranks: Ranks | None = None) -> World:
    limit = timeout if _is_timeout(timeout) else c10d.default_timeout()
    store = c10d.default_store()
    if ranks is None:
        return World(store, dist.get_rank(), dist.get_world_size(), limit)
    store = PrefixStore(f"tpkernels/among/{digest(ranks)}", store)
    return World(store, dist.get_rank(), len(ranks), limit, ranks)


def digest(ranks: object) -> str:
    """A short hash of ranks, the same in every process."""
    return sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()[:16]


def _is_timeout(timeout: object) -> TypeGuard[timedelta]:
    return isinstance(timeout, timedelta) and timeout > timedelta()


def _create(
    plan: GroupPlan,
    request: str,
    call: int,
    timeout: timedelta | None,
    backend: str | None,
    group_options: Mapping[Kind, Any] | None,
    kinds: Sequence[Kind],
) -> ParallelState:
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if timeout is not None and not _is_timeout(timeout):
        raise ValueError(f"timeout must be positive, got {timeout!r}")
    for kind in group_options or {}:
        if kind not in kinds:
            raise ValueError(f"group_options has an unknown kind {kind!r}; known are {', '.join(kinds)}")
    rank = dist.get_rank()
    groups, problem = None, ""
    try:
        groups = create_process_groups(
            plan,
            rank,
            call=call,
            timeout=timeout,
            backend=backend,
            options=group_options or {},
            kinds=kinds,
        )
    except ParallelStateError as error:
        problem = str(error)
    try:
        # A rank that went on, perhaps to the end of a short program, would break connections that slower
        # ranks are still making. If one rank has failed, all raise.
        meet(request, call, problem, timeout)
    except ParallelStateError:
        if groups is not None:
            destroy_process_groups(groups)
        raise
    assert groups is not None, "without groups there is a problem, hence an error"
    return ParallelState(rank=rank, plan=plan, process_groups=groups)


def as_text(function: Callable[..., object], given: Mapping[str, object]) -> str:
    """Write a call as text, the same on all ranks; arguments with default values are left out."""
    said = [
        f"{name}={plain(given[name])!r}"
        for name, parameter in inspect.signature(function).parameters.items()
        if repr(plain(given[name])) != repr(parameter.default)
    ]
    return f"{function.__name__}({', '.join(said)})"


def plain(value: object) -> object:
    """Convert a value so that its text is the same on all ranks.

    Integers of other libraries become Python's, functions and mappings their names.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, Mapping):
        return sorted(map(repr, value)) or None
    return getattr(value, "__qualname__", "a function") if callable(value) else value
