"""Initializes model parallelism: ranks agree on sizes, check them, and create process groups."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, SupportsIndex

import torch.distributed as dist

from tpkernels.runtime.agreement import agree, meet
from tpkernels.runtime.process_groups import (
    GroupSettings,
    ProcessGroups,
    create_process_groups,
    destroy_groups,
    destroy_process_groups,
)
from tpkernels.runtime.state import (
    ParallelState,
    ParallelStateError,
    current_or_none,
    install,
    uninstall,
)
from tpkernels.topology.plan import GroupPlan, Kind, plan_groups
from tpkernels.topology.sizes import DEFAULT_ORDER


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
    return start(request, plan, GroupSettings(timeout, backend, group_options))


def start(request: str, plan: Callable[..., GroupPlan], settings: GroupSettings) -> ParallelState:
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
    group_options: Mapping[Kind, Any] | None = None,
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
        f"{name}={plain(given[name])!r}"
        for name, parameter in inspect.signature(function).parameters.items()
        if repr(plain(given[name])) != repr(parameter.default)
    ]
    return f"{function.__name__}({', '.join(said)})"


def plain(value: object) -> object:
    """Convert a value so that its text is the same on all ranks.

    Other libraries' integers become Python's, functions their names, mappings their keys.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, Mapping):
        return sorted(map(repr, value)) or None
    return getattr(value, "__qualname__", "a function") if callable(value) else value
