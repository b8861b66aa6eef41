"""From sizes to process groups: agree, then check, then create."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, SupportsIndex, TypeGuard

import torch.distributed as dist

from tpkernels.runtime import c10d
from tpkernels.runtime.agreement import agree, meet
from tpkernels.runtime.process_groups import ProcessGroups, create_process_groups, destroy_process_groups
from tpkernels.runtime.state import (
    ParallelState,
    ParallelStateError,
    current_or_none,
    install,
    uninstall,
)
from tpkernels.topology.plan import KINDS, GroupPlan, Kind, plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER

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
    disagree all get the same error, which says what two of them asked for.

    virtual_pipeline_model_parallel_size: interleaved stages on each rank; needs 2 or more pipeline stages
    pipeline_model_parallel_split_rank: the first stage of the decoder, in a model that has an encoder too
    order: axes from the fastest varying to the slowest
    timeout: for the agreement and for every group's collectives; default: the default process group's
    backend: of every group; default: the default process group's
    group_options: backend options by kind, such as {"tp": ProcessGroupNCCL.Options(...)} for high-priority
        streams; a kind that is named here shares no communicator with other kinds or the default group
    """
    request = as_text(
        initialize_model_parallel,
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_split_rank,
        context_parallel_size,
        expert_model_parallel_size,
        order,
        timeout,
        backend,
        sorted(map(repr, group_options)) if group_options else None,
    )

    def plan() -> GroupPlan:
        return plan_groups(
            world_size=dist.get_world_size(),
            tensor=tensor_model_parallel_size,
            pipeline=pipeline_model_parallel_size,
            context=context_parallel_size,
            expert=expert_model_parallel_size,
            virtual_pipeline=virtual_pipeline_model_parallel_size,
            split_rank=pipeline_model_parallel_split_rank,
            order=order,
        )

    return start(request, plan, timeout, backend, group_options or {}, KINDS)


def start(
    request: str,
    plan: Callable[[], GroupPlan],
    timeout: timedelta | None,
    backend: str | None,
    group_options: Mapping[Kind, Any],
    kinds: Sequence[Kind],
) -> ParallelState:
    """Agree on `request`; then check, by making the plan; then create groups and install the state."""
    if current_or_none() is not None:
        request += " while its model parallel groups are already initialized"
    # before any check, so that a rank with a bad argument refuses together with all the others
    call = _agree(request, timeout)
    if current_or_none() is not None:
        raise ParallelStateError(
            "model parallel groups are already initialized: call destroy_model_parallel() first, or "
            "create_parallel_state(plan) for a second state beside this one"
        )
    state = _create(plan(), request, call, timeout, backend, group_options, kinds)
    install(state)
    return state


def create_parallel_state(
    plan: GroupPlan,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    group_options: Mapping[Kind, Any] | None = None,
) -> ParallelState:
    """The process groups of `plan` as a state of its own, to be passed to layers or entered by `use(state)`.

    Every rank calls it with an equal plan. Ends with `destroy_parallel_state(state)`.
    """
    options = sorted(map(repr, group_options)) if group_options else None
    request = as_text(create_parallel_state, plan, timeout, backend, options)
    call = _agree(request, timeout)
    if not isinstance(plan, GroupPlan):
        raise TypeError(f"plan: expected a GroupPlan, as plan_groups(...) makes it, got {plan!r}")
    if plan.world_size != dist.get_world_size():
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but this world has {dist.get_world_size()}"
        )
    return _create(plan, request, call, timeout, backend, group_options or {}, KINDS)


def destroy_model_parallel() -> None:
    """Destroy the groups of the current state and forget it. Harmless when there is none."""
    state = current_or_none()
    uninstall()
    if state is not None:
        destroy_parallel_state(state)


def destroy_parallel_state(state: ParallelState) -> None:
    """Destroy the process groups of `state`."""
    if isinstance(state.process_groups, ProcessGroups):  # not those that somebody else brought
        destroy_process_groups(state.process_groups)


def _agree(request: str, timeout: timedelta | None) -> int:
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group(...) first"
        )
    if dist.get_backend() == "fake":  # one process that pretends: there is nobody to agree with
        return next(_FAKE_CALLS)
    return agree(request, **_world(timeout))


def _meet(request: str, call: int, problem: str, timeout: timedelta | None) -> None:
    if dist.get_backend() != "fake":
        meet(request, call, problem, **_world(timeout))
    elif problem:
        raise ParallelStateError(problem)


def _world(timeout: timedelta | None) -> dict[str, Any]:
    """Where and how long ranks wait for each other."""
    return {
        "store": c10d.default_store(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "timeout": timeout if _is_timeout(timeout) else c10d.default_timeout(),
    }


def _is_timeout(timeout: object) -> TypeGuard[timedelta]:
    return isinstance(timeout, timedelta) and timeout > timedelta()


def _create(
    plan: GroupPlan,
    request: str,
    call: int,
    timeout: timedelta | None,
    backend: str | None,
    group_options: Mapping[Kind, Any],
    kinds: Sequence[Kind],
) -> ParallelState:
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if timeout is not None and not _is_timeout(timeout):
        raise ValueError(f"timeout must be positive, got {timeout!r}")
    for kind in group_options:
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
            options=group_options,
            kinds=kinds,
        )
    except ParallelStateError as error:
        problem = str(error)
    try:
        # A rank that went on, to the end of a short program perhaps, would break the connections that slower
        # ones are still making; and where one has failed, all have.
        _meet(request, call, problem, timeout)
    except ParallelStateError:
        if groups is not None:
            destroy_process_groups(groups)
        raise
    assert groups is not None, "without groups there is a problem, hence an error"
    return ParallelState(rank=rank, plan=plan, process_groups=groups)


def as_text(function: Callable[..., object], *values: object) -> str:
    """A call as one would write it. What is left out is exactly an argument's own default."""
    parameters = inspect.signature(function).parameters.values()
    said = [
        f"{parameter.name}={_plain(value)!r}"
        for parameter, value in zip(parameters, values, strict=True)
        if repr(_plain(value)) != repr(parameter.default)
    ]
    return f"{function.__name__}({', '.join(said)})"


def _plain(value: object) -> object:
    """Integers of other libraries as Python's, which are equal and should look so."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    return value
