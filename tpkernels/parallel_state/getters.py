"""Megatron's functions of a parallel state that have the same arguments and answers in all three faces.

`tpkernels.parallel_state` adds those of today's Megatron (`todays`, `stages`), which `interop.mpu` has, too;
`interop.megatron_core.parallel_state` adds those of Megatron-Core 0.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.parallel_state import table
from tpkernels.parallel_state.table import GroupOrNone, NamedGroup, public_names, set_number, state_for
from tpkernels.runtime.state import ParallelStateError, current_or_none, on_the_fly
from tpkernels.topology.groups import Ranks
from tpkernels.topology.plan import Kind


def model_parallel_is_initialized() -> bool:
    """Whether model and data parallel groups exist."""
    return current_or_none() is not None


def is_initialized() -> bool:
    """Whether data parallel groups exist: when model parallel groups do."""
    return model_parallel_is_initialized()


get_model_parallel_group = table.MODEL.group
"""The ranks that share one model: tensor x pipeline."""
get_model_parallel_src_rank = NamedGroup("model", "Model parallel group").source_rank

get_tensor_model_parallel_group = table.TENSOR.group
get_tensor_model_parallel_world_size = table.TENSOR.world_size
get_tensor_model_parallel_rank = table.TENSOR.rank
set_tensor_model_parallel_world_size = table.TENSOR.set_world_size
set_tensor_model_parallel_rank = table.TENSOR.set_rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first global rank of this rank's tensor group, also where its size was set."""
    state, size = current_or_none(), on_the_fly().tensor_size
    if size is None:
        return table.TENSOR.source_rank()
    rank = dist.get_rank() if state is None else state.rank
    return rank // size * size


get_pipeline_model_parallel_group = table.PIPELINE.group
get_pipeline_model_parallel_world_size = table.PIPELINE.world_size
get_pipeline_model_parallel_rank = table.PIPELINE.rank
set_pipeline_model_parallel_world_size = table.PIPELINE.set_world_size
set_pipeline_model_parallel_rank = table.PIPELINE.set_rank


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of this pipeline's first stage."""
    return _pipeline()[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of this pipeline's last stage."""
    return _pipeline()[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last comes the first."""
    stage, stages = get_pipeline_model_parallel_rank(), get_pipeline_model_parallel_world_size()
    return _pipeline()[(stage + 1) % stages]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the previous stage; before the first comes the last."""
    stage, stages = get_pipeline_model_parallel_rank(), get_pipeline_model_parallel_world_size()
    return _pipeline()[(stage - 1) % stages]


def _pipeline() -> Ranks:
    ranks = state_for("Pipeline parallel group").ranks("pp")
    if get_pipeline_model_parallel_world_size() > len(ranks):
        raise ParallelStateError(
            f"the pipeline size was set to {get_pipeline_model_parallel_world_size()} on the fly, but this "
            f"rank's pipeline group has {len(ranks)} ranks; take it back by "
            "set_pipeline_model_parallel_world_size(None)"
        )
    return ranks


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that is being worked on; None without a virtual pipeline."""
    return on_the_fly().virtual_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """How many virtual stages there are; None without a virtual pipeline."""
    return on_the_fly().virtual_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Say which virtual stage is being worked on."""
    set_number("virtual_rank", rank)


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Say how many virtual stages there are; None: no virtual pipeline."""
    set_number("virtual_size", world_size)


set_data_parallel_rank = table.DATA.set_rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first global rank of this rank's data group."""
    kind: Kind = "dp_cp" if with_context_parallel else "dp"
    return NamedGroup(kind, "Data parallel group").source_rank()


get_context_parallel_group = table.CONTEXT.group
get_context_parallel_global_ranks = table.CONTEXT.global_ranks
get_tensor_and_context_parallel_group = table.TENSOR_AND_CONTEXT.group


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> GroupOrNone:
    """This rank's process group over the ranks of its tensor and data groups."""
    kind: Kind = "tp_dp_cp" if with_context_parallel else "tp_dp"
    return NamedGroup(kind, "tensor and data parallel group").group(check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """The ranks that share fp8 scales: tensor, data unless tp_only_amax_red, context if asked for."""
    kinds: tuple[Kind, Kind] = ("tp", "tp_cp") if tp_only_amax_red else ("tp_dp", "tp_dp_cp")
    return NamedGroup(kinds[with_context_parallel], "FP8 amax reduction group").group()


get_embedding_group = table.EMBEDDING.group
"""The stages of this pipeline that share the word embedding. On others an error, or None."""
get_position_embedding_group = table.POSITION_EMBEDDING.group
"""The stages of this pipeline that share the position embedding. On others an error, or None."""

get_expert_model_parallel_group = table.EXPERT.group
get_expert_model_parallel_src_rank = table.EXPERT.source_rank
set_expert_model_parallel_world_size = table.EXPERT.set_world_size
set_expert_model_parallel_rank = table.EXPERT.set_rank

get_expert_tensor_parallel_group = table.EXPERT_TENSOR.group
"""The ranks that one expert's weights are split over."""
set_expert_tensor_parallel_world_size = table.EXPERT_TENSOR.set_world_size
set_expert_tensor_parallel_rank = table.EXPERT_TENSOR.set_rank

get_expert_tensor_and_model_parallel_group = table.EXPERT_TENSOR_AND_MODEL.group


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> GroupOrNone:
    """This rank's process group over all stages of its experts' tensor and expert ranks.

    with_egtp_remat: no effect: no weights are gathered for each use
    """
    return table.ALL_STAGES.group(check_initialized)


get_gtp_weight_remat_group = table.REMAT.group
get_gtp_weight_remat_world_size = table.REMAT.world_size
get_gtp_weight_remat_rank = table.REMAT.rank
get_gtp_weight_remat_global_ranks = table.REMAT.global_ranks
get_expert_gtp_weight_remat_group = table.EXPERT_REMAT.group
get_expert_gtp_weight_remat_world_size = table.EXPERT_REMAT.world_size
get_expert_gtp_weight_remat_rank = table.EXPERT_REMAT.rank
get_expert_gtp_weight_remat_global_ranks = table.EXPERT_REMAT.global_ranks


if not TYPE_CHECKING:  # a checker goes by the names themselves
    __all__ = public_names(globals())
