"""Megatron's `parallel_state`, with its names, arguments and results, over the state in `tpkernels.groups`.

Before `initialize_model_parallel` getters raise `ParallelStateError`, which is both a `RuntimeError` and an
`AssertionError`, as callers may catch either. The `set_...` functions change sizes and ranks on the fly, with
or without an initialized state; None undoes a change (of the virtual pipeline: it sets None).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from inspect import signature
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from tpkernels.groups.initialize import GroupSettings, agree_and_create, as_text, canonical
from tpkernels.groups.initialize import destroy_model_parallel as destroy_model_parallel
from tpkernels.groups.plan import COMBINED_KINDS, KINDS, GroupKind, GroupPlan, plan_groups
from tpkernels.groups.sizes import DEFAULT_ORDER, InvalidSizes
from tpkernels.groups.state import ParallelState
from tpkernels.parallel_state import table, todays
from tpkernels.parallel_state.table import *  # noqa: F403
from tpkernels.parallel_state.todays import *  # noqa: F403

if not TYPE_CHECKING:  # type checkers read the imports
    __all__ = ["destroy_model_parallel", "initialize_model_parallel", *table.__all__, *todays.__all__]

EmbeddingRanks = Callable[..., Any] | None


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
    distributed_timeout_minutes: float | None = None,
    create_gloo_process_groups: bool = True,
    expert_tensor_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    sharp_enabled_group: str | None = None,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    nccl_communicator_config_path: str | None = None,
    high_priority_stream_groups: Sequence[str] | None = None,
    get_embedding_ranks: EmbeddingRanks = None,
    get_position_embedding_ranks: EmbeddingRanks = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> ParallelState:
    """As `tpkernels.initialize_model_parallel`, but also make combined groups, such as tensor x data.

    Takes the arguments of today's Megatron, too.

    distributed_timeout_minutes: `timeout` in minutes; by default the default process group's, too
    create_gloo_process_groups: no effect, see `get_data_parallel_group_gloo`
    expert_tensor_parallel_size: None or the tensor-parallel size

    Other arguments support Megatron's defaults only; `docs/megatron.md` has alternatives.
    """
    given = dict(locals())
    # "parallel_state.": it makes other groups than tpkernels.initialize_model_parallel
    request = f"parallel_state.{as_text(initialize_model_parallel, given)}"
    limit = timeout if distributed_timeout_minutes is None else _from_minutes(distributed_timeout_minutes)

    def plan(world_size: int) -> GroupPlan:
        for name, default in _ONLY.items():
            if given[name] != default and (given[name] or default):
                raise InvalidSizes(
                    f"{name}: expected {default!r}, got {canonical(given[name])!r}: it is not supported; "
                    "docs/megatron.md says what to use instead"
                )
        if expert_tensor_parallel_size not in (None, tensor_model_parallel_size):
            raise InvalidSizes(
                f"expert_tensor_parallel_size: expected {tensor_model_parallel_size}, the "
                f"tensor_model_parallel_size, whose groups experts use, got {expert_tensor_parallel_size!r}"
            )
        if distributed_timeout_minutes is not None and (timeout is not None or limit is None):
            raise InvalidSizes(
                "distributed_timeout_minutes: expected a positive number, and no timeout= with it, got "
                f"{distributed_timeout_minutes!r} and timeout={timeout!r}"
            )
        return plan_groups(
            world_size=world_size,
            tensor=tensor_model_parallel_size,
            pipeline=pipeline_model_parallel_size,
            context=context_parallel_size,
            expert=expert_model_parallel_size,
            virtual_pipeline=virtual_pipeline_model_parallel_size,
            split_rank=pipeline_model_parallel_split_rank,
            order=order,
        )

    return agree_and_create(
        request, plan, GroupSettings(limit, backend, group_options, (*KINDS, *COMBINED_KINDS))
    )


_PARAMETERS = signature(initialize_model_parallel).parameters
# From this argument on each must have its default, which is Megatron's, or another empty value.
_ONLY: Mapping[str, object] = {
    name: _PARAMETERS[name].default
    for name in dropwhile(lambda name: name != "pipeline_model_parallel_comm_backend", _PARAMETERS)
}


def _from_minutes(minutes: float) -> timedelta | None:
    is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    return timedelta(minutes=minutes) if is_number and 0 < minutes < 1e6 else None
