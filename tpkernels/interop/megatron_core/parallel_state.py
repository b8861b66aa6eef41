"""The names of Megatron-Core 0.16's `parallel_state`, with its arguments and answers.

Most are those of `tpkernels.parallel_state`. These differ: what newer and older Megatrons define otherwise
(arguments of data-parallel getters, `vp_stage`), what is only here (`RankGenerator`, second communicators,
instances of the distributed optimizer, gloo twins, the memory buffer), and zeros where torch.distributed is
not initialized, on which Megatron's code relies. Keyword-only arguments are those of newer Megatrons.
"""

from __future__ import annotations

from typing import Any

from tpkernels.interop.megatron_core import getters, initialize, memory_buffer, stages, torch_groups
from tpkernels.interop.megatron_core.getters import *  # noqa: F403
from tpkernels.interop.megatron_core.initialize import *  # noqa: F403
from tpkernels.interop.megatron_core.memory_buffer import *  # noqa: F403
from tpkernels.interop.megatron_core.memory_buffer import (
    set_global_memory_buffer as _set_global_memory_buffer,
)
from tpkernels.interop.megatron_core.memory_buffer import (
    set_global_symmetric_memory_buffer as _set_global_symmetric_memory_buffer,
)
from tpkernels.interop.megatron_core.rank_lists import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from tpkernels.interop.megatron_core.stages import *  # noqa: F403
from tpkernels.interop.megatron_core.torch_groups import *  # noqa: F403
from tpkernels.parallel_state.dense import (
    get_context_parallel_global_ranks,
    get_context_parallel_group,
    get_data_parallel_src_rank,
    get_embedding_group,
    get_model_parallel_group,
    get_model_parallel_src_rank,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_position_embedding_group,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    group_for,
    is_initialized,
    model_parallel_is_initialized,
    set_data_parallel_rank,
    set_pipeline_model_parallel_rank,
    set_pipeline_model_parallel_world_size,
    set_tensor_model_parallel_rank,
    set_tensor_model_parallel_world_size,
)
from tpkernels.parallel_state.experts import (
    get_amax_reduction_group,
    get_expert_gtp_weight_remat_global_ranks,
    get_expert_gtp_weight_remat_group,
    get_expert_gtp_weight_remat_rank,
    get_expert_gtp_weight_remat_world_size,
    get_expert_model_parallel_group,
    get_expert_model_parallel_src_rank,
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_model_pipeline_parallel_group,
    get_expert_tensor_parallel_group,
    get_gtp_weight_remat_global_ranks,
    get_gtp_weight_remat_group,
    get_gtp_weight_remat_rank,
    get_gtp_weight_remat_world_size,
    get_tensor_and_context_parallel_group,
    get_tensor_and_data_parallel_group,
    set_expert_model_parallel_rank,
    set_expert_model_parallel_world_size,
    set_expert_tensor_parallel_rank,
    set_expert_tensor_parallel_world_size,
)
from tpkernels.parallel_state.stages import (
    get_pipeline_model_parallel_first_rank,
    get_pipeline_model_parallel_last_rank,
    get_pipeline_model_parallel_next_rank,
    get_pipeline_model_parallel_prev_rank,
    get_virtual_pipeline_model_parallel_rank,
    get_virtual_pipeline_model_parallel_world_size,
    set_virtual_pipeline_model_parallel_rank,
    set_virtual_pipeline_model_parallel_world_size,
)

__all__ = [
    "RankGenerator",
    "_set_global_memory_buffer",
    "_set_global_symmetric_memory_buffer",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "generate_masked_orthogonal_rank_groups",
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_data_parallel_src_rank",
    "get_embedding_group",
    "get_expert_gtp_weight_remat_global_ranks",
    "get_expert_gtp_weight_remat_group",
    "get_expert_gtp_weight_remat_rank",
    "get_expert_gtp_weight_remat_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_src_rank",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_gtp_weight_remat_global_ranks",
    "get_gtp_weight_remat_group",
    "get_gtp_weight_remat_rank",
    "get_gtp_weight_remat_world_size",
    "get_model_parallel_group",
    "get_model_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "is_initialized",
    "model_parallel_is_initialized",
    "set_data_parallel_rank",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]
__all__ += getters.__all__
__all__ += initialize.__all__
__all__ += memory_buffer.__all__
__all__ += stages.__all__
__all__ += torch_groups.__all__

# Megatron's private variables, which its tests and some programs read; setting them changes nothing.
_VARIABLES = {
    "_MODEL_PARALLEL_GROUP": "get_model_parallel_group",
    "_TENSOR_MODEL_PARALLEL_GROUP": "get_tensor_model_parallel_group",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "get_pipeline_model_parallel_group",
    "_CONTEXT_PARALLEL_GROUP": "get_context_parallel_group",
    "_EMBEDDING_GROUP": "get_embedding_group",
    "_POSITION_EMBEDDING_GROUP": "get_position_embedding_group",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "get_tensor_and_context_parallel_group",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "get_tensor_and_data_parallel_group",
    "_EXPERT_MODEL_PARALLEL_GROUP": "get_expert_model_parallel_group",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "get_expert_tensor_parallel_group",
    "_EXPERT_DATA_PARALLEL_GROUP": "get_expert_data_parallel_group",
}


def __getattr__(name: str) -> Any:
    if name in _VARIABLES:
        return globals()[_VARIABLES[name]](check_initialized=False)
    if name == "_DATA_PARALLEL_GROUP_WITH_CP_AG":
        return getters.further("dp_cp_all_gather")
    if name in ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"):
        kind: Any = "dp_cp" if name.endswith("CP") else "dp"
        return group_for("data parallel group", kind, check_initialized=False)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
