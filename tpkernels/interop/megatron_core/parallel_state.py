"""The names of Megatron-Core 0.16's `parallel_state`, with its arguments and answers.

Most are those of `tpkernels.parallel_state`. These differ: what newer and older Megatrons define otherwise
(arguments of data-parallel getters, `vp_stage`), what is only here (`RankGenerator`, second communicators,
instances of the distributed optimizer, gloo twins, the memory buffer), and zeros where torch.distributed is
not initialized, on which Megatron's code relies. Keyword-only arguments are those of newer Megatrons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpkernels.interop.megatron_core import getters, initialize, memory_buffer
from tpkernels.interop.megatron_core.getters import *  # noqa: F403
from tpkernels.interop.megatron_core.initialize import *  # noqa: F403
from tpkernels.interop.megatron_core.memory_buffer import *  # noqa: F403
from tpkernels.interop.megatron_core.memory_buffer import (
    set_global_memory_buffer as _set_global_memory_buffer,
)
from tpkernels.interop.megatron_core.memory_buffer import (
    set_global_symmetric_memory_buffer as _set_global_symmetric_memory_buffer,
)
from tpkernels.interop.megatron_core.rank_lists import RankGenerator as RankGenerator
from tpkernels.interop.megatron_core.rank_lists import default_embedding_ranks as default_embedding_ranks
from tpkernels.interop.megatron_core.rank_lists import (
    default_position_embedding_ranks as default_position_embedding_ranks,
)
from tpkernels.interop.megatron_core.rank_lists import (
    generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
)
from tpkernels.parallel_state import getters as shared
from tpkernels.parallel_state.getters import *  # noqa: F403
from tpkernels.parallel_state.table import data_group

if not TYPE_CHECKING:  # a checker goes by the imports
    __all__ = [
        "RankGenerator",
        "_set_global_memory_buffer",
        "_set_global_symmetric_memory_buffer",
        "default_embedding_ranks",
        "default_position_embedding_ranks",
        "generate_masked_orthogonal_rank_groups",
    ]
    __all__ += getters.__all__ + initialize.__all__ + memory_buffer.__all__ + shared.__all__

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
        return getters._further("dp_cp_all_gather")
    if name in ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"):
        return data_group(with_context_parallel=name.endswith("CP")).group(check_initialized=False)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
