"""Functions of today's Megatron whose arguments or results differ from those of Megatron-Core 0.16.

First groups of ranks, then stages of the pipeline.

with_gtp_remat has no effect: no weights are gathered for each use; nor has partial_data_parallel: there is
one instance of the distributed optimizer.
ignore_virtual: the virtual stage does not count; the default is True in today's Megatron, and in
    `tpkernels.interop.megatron_core`
vp_stage: a virtual stage; by default the current one, initially 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from tpkernels.groups.c10d import takes_cpu_tensors_by_gloo
from tpkernels.groups.state import ParallelStateError, current_or_none, on_the_fly
from tpkernels.parallel_state import table
from tpkernels.parallel_state.table import (
    PIPELINE,
    GroupOrNone,
    NamedGroup,
    change_number,
    data_group,
    public_names,
    state_for,
)

get_context_parallel_world_size = table.CONTEXT.world_size
get_context_parallel_rank = table.CONTEXT.rank
get_tensor_and_context_parallel_world_size = table.TENSOR_AND_CONTEXT.world_size
get_tensor_and_context_parallel_rank = table.TENSOR_AND_CONTEXT.rank
get_expert_model_parallel_world_size = table.EXPERT.world_size
get_expert_model_parallel_rank = table.EXPERT.rank
get_expert_tensor_parallel_world_size = table.EXPERT_TENSOR.world_size
get_expert_tensor_parallel_rank = table.EXPERT_TENSOR.rank
get_expert_tensor_and_model_parallel_world_size = table.EXPERT_TENSOR_AND_MODEL.world_size
get_expert_tensor_and_model_parallel_rank = table.EXPERT_TENSOR_AND_MODEL.rank
get_intra_distributed_optimizer_instance_group = table.OPTIMIZER_INSTANCE.group
"""All ranks, because there is one instance."""


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The ranks that hold the same shards of the model, and of the sequence unless with_context_parallel."""
    return data_group(with_context_parallel, partial_data_parallel).group()


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """The number of ranks in `get_data_parallel_group`."""
    return data_group(with_context_parallel, partial_data_parallel).world_size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """This rank's position in `get_data_parallel_group`, or the rank that was set."""
    return data_group(with_context_parallel, partial_data_parallel).rank()


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The data group; raises unless gloo moves its CPU tensors."""
    return _by_gloo(data_group(with_context_parallel, partial_data_parallel))


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> GroupOrNone:
    """The ranks that hold the same shards of the same experts."""
    return table.EXPERT_DATA.group(check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """The number of ranks in `get_expert_data_parallel_group`."""
    return table.EXPERT_DATA.world_size()


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's position in `get_expert_data_parallel_group`."""
    return table.EXPERT_DATA.rank()


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The expert data group; raises unless gloo moves its CPU tensors."""
    return _by_gloo(table.EXPERT_DATA)


def _by_gloo(row: NamedGroup) -> ProcessGroup:
    group = NamedGroup(row.kind, f"{row.error_name}-gloo").group()
    if not takes_cpu_tensors_by_gloo(group):
        raise ParallelStateError(
            f"the {row.kind} group does not move CPU tensors by gloo, and has no twin that does: make groups "
            'of both, by init_process_group("cpu:gloo,cuda:nccl") or initialize_model_parallel(..., '
            'backend="cpu:gloo,cuda:nccl")'
        )
    return group


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> None:
    """Return None, because there is one instance; raise if check_initialized, as in Megatron."""
    _not_here("inter distributed optimizer instance group", check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> None:
    """Return None; raise if check_initialized, as in Megatron without these groups."""
    _not_here("hierarchical context parallel groups", check_initialized)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """The data and context group; raises unless it has group_size ranks: there are no smaller groups."""
    size = table.DATA_AND_CONTEXT.world_size()
    if group_size != size:
        raise ParallelStateError(
            f"hybrid data and context parallel groups of {group_size} ranks do not exist, only the group of "
            f"all {size} data and context ranks"
        )
    return table.DATA_AND_CONTEXT.group()


def _not_here(what: str, check_initialized: bool) -> None:
    if check_initialized:
        state_for(what)
        raise ParallelStateError(
            f"{what} is not initialized: it is not supported; check_initialized=False returns None"
        )


def get_all_ranks() -> str:
    """This rank's tensor, weight-gathering, data, context, pipeline and expert ranks, joined by "_"."""
    others = get_data_parallel_rank, get_context_parallel_rank, get_expert_model_parallel_rank
    return table.all_ranks(*others, remat=[lambda: 0])


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the decoder's first stage."""
    change_number("split_rank", rank)


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first stage of the decoder, or None in a model without one."""
    state, changed = current_or_none(), on_the_fly().split_rank
    return changed if changed is not None or state is None else state.plan.split_rank


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage, in a virtual pipeline also the first virtual stage."""
    first = PIPELINE.rank() == 0
    return _at(first, lambda stage, stages: stage == 0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage, in a virtual pipeline also the last virtual stage."""
    last = PIPELINE.rank() == PIPELINE.world_size() - 1
    return _at(last, lambda stage, stages: stage == stages - 1, ignore_virtual, vp_stage)


def is_rank_in_embedding_group(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the word embedding, in a virtual pipeline in this virtual stage."""
    state = state_for("embedding group")
    ranks = state.plan.members_near(state.rank, "embedding")

    def holds(stage: int | None, stages: int) -> bool:
        if state.rank == ranks[0]:
            return PIPELINE.rank() == 0 and stage == 0
        if state.rank == ranks[-1]:
            last = PIPELINE.world_size() - 1
            return PIPELINE.rank() == last and stage == stages - 1
        return True

    return _at(state.rank in ranks, holds, ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the position embedding."""
    return state_for("position embedding group").is_member("position_embedding")


def _at(
    at_stage: bool, at: Callable[[int | None, int], bool], ignore_virtual: bool, vp_stage: int | None
) -> bool:
    """Combine the answer for the pipeline stage with that for the virtual stage, `at(stage, stages)`."""
    stages = on_the_fly().virtual_size
    if vp_stage is not None and stages is not None and not 0 <= vp_stage < stages:
        raise ValueError(f"vp_stage: expected a virtual stage from 0 to {stages - 1}, got {vp_stage}")
    if not at_stage or ignore_virtual or stages is None:
        return at_stage
    return at(on_the_fly().virtual_rank if vp_stage is None else vp_stage, stages)


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage, by default this rank's, belongs to the encoder; True in a model without a split."""
    split = _split_if_parallel()
    return split is None or (PIPELINE.rank() if rank is None else rank) < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage, by default this rank's, belongs to the decoder; True in a model without a split."""
    split = _split_if_parallel()
    return split is None or (PIPELINE.rank() if rank is None else rank) >= split


def _split_if_parallel() -> int | None:
    return None if PIPELINE.world_size() == 1 else get_pipeline_model_parallel_split_rank()


def is_pipeline_stage_at_split() -> bool:
    """Whether this is the encoder's last stage and the next stage belongs to the decoder."""
    stage = PIPELINE.rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


if not TYPE_CHECKING:
    __all__ = public_names(globals())
