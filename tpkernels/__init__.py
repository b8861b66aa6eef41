"""Tensor-parallel layers for PyTorch on fused Triton kernels with overlapped communication.

The names below are imported when they are first used: `import tpkernels` alone loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpkernels._renamed import keep_former_names

__version__ = "0.1.0"

if TYPE_CHECKING:  # for type checkers: the same names as in _HOME
    from tpkernels import interop as interop
    from tpkernels import ops as ops
    from tpkernels import optim as optim
    from tpkernels import parallel_state as parallel_state
    from tpkernels.buckets.collectives import bucketed_all_gather as bucketed_all_gather
    from tpkernels.buckets.collectives import bucketed_all_reduce_ as bucketed_all_reduce_
    from tpkernels.buckets.collectives import bucketed_broadcast_ as bucketed_broadcast_
    from tpkernels.buckets.collectives import bucketed_reduce_scatter as bucketed_reduce_scatter
    from tpkernels.buckets.gradients import GradientBuckets as GradientBuckets
    from tpkernels.interop.parallelize import parallelize as parallelize
    from tpkernels.kernels.recipe import Recipe as Recipe
    from tpkernels.layers.attention import ParallelAttention as ParallelAttention
    from tpkernels.layers.block import TransformerBlock as TransformerBlock
    from tpkernels.layers.checkpoint import checkpoint as checkpoint
    from tpkernels.layers.clip import clip_grad_norm_ as clip_grad_norm_
    from tpkernels.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from tpkernels.layers.functional import (
        copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
    )
    from tpkernels.layers.functional import (
        gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
    )
    from tpkernels.layers.functional import (
        gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
    )
    from tpkernels.layers.functional import linear_cross_entropy as linear_cross_entropy
    from tpkernels.layers.functional import (
        reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
    )
    from tpkernels.layers.functional import (
        reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
    )
    from tpkernels.layers.functional import (
        scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
    )
    from tpkernels.layers.functional import (
        scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
    )
    from tpkernels.layers.functional import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tpkernels.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from tpkernels.layers.linear import RowParallelLinear as RowParallelLinear
    from tpkernels.layers.mlp import ParallelMLP as ParallelMLP
    from tpkernels.layers.norm import LayerNorm as LayerNorm
    from tpkernels.layers.norm import RMSNorm as RMSNorm
    from tpkernels.layers.replicas import check_replicas as check_replicas
    from tpkernels.layers.replicas import finalize_gradients as finalize_gradients
    from tpkernels.models.config import GPTConfig as GPTConfig
    from tpkernels.models.config import model_config as model_config
    from tpkernels.models.gpt import GPT as GPT
    from tpkernels.ops.quantized.weights import reuse_quantized_weights as reuse_quantized_weights
    from tpkernels.runtime.initialize import create_parallel_state as create_parallel_state
    from tpkernels.runtime.initialize import destroy_model_parallel as destroy_model_parallel
    from tpkernels.runtime.initialize import destroy_parallel_state as destroy_parallel_state
    from tpkernels.runtime.initialize import initialize_model_parallel as initialize_model_parallel
    from tpkernels.runtime.random import get_rng_tracker as get_rng_tracker
    from tpkernels.runtime.random import manual_seed as manual_seed
    from tpkernels.runtime.state import ParallelState as ParallelState
    from tpkernels.runtime.state import ParallelStateError as ParallelStateError
    from tpkernels.runtime.state import current as current
    from tpkernels.runtime.state import use as use
    from tpkernels.topology.plan import GroupPlan as GroupPlan
    from tpkernels.topology.plan import plan_groups as plan_groups
    from tpkernels.topology.sizes import InvalidSizes as InvalidSizes
    from tpkernels.tp_invariance import tp_invariant as tp_invariant

_HOME = {
    "interop": "tpkernels",
    "ops": "tpkernels",
    "optim": "tpkernels",
    "parallel_state": "tpkernels",
    "bucketed_all_gather": "tpkernels.buckets.collectives",
    "bucketed_all_reduce_": "tpkernels.buckets.collectives",
    "bucketed_broadcast_": "tpkernels.buckets.collectives",
    "bucketed_reduce_scatter": "tpkernels.buckets.collectives",
    "GradientBuckets": "tpkernels.buckets.gradients",
    "parallelize": "tpkernels.interop.parallelize",
    "Recipe": "tpkernels.kernels.recipe",
    "ParallelAttention": "tpkernels.layers.attention",
    "TransformerBlock": "tpkernels.layers.block",
    "checkpoint": "tpkernels.layers.checkpoint",
    "clip_grad_norm_": "tpkernels.layers.clip",
    "linear_cross_entropy": "tpkernels.layers.functional",
    "vocab_parallel_cross_entropy": "tpkernels.layers.functional",
    "VocabParallelEmbedding": "tpkernels.layers.embedding",
    "ColumnParallelLinear": "tpkernels.layers.linear",
    "RowParallelLinear": "tpkernels.layers.linear",
    "ParallelMLP": "tpkernels.layers.mlp",
    "LayerNorm": "tpkernels.layers.norm",
    "RMSNorm": "tpkernels.layers.norm",
    "copy_to_tensor_model_parallel_region": "tpkernels.layers.functional",
    "gather_from_sequence_parallel_region": "tpkernels.layers.functional",
    "gather_from_tensor_model_parallel_region": "tpkernels.layers.functional",
    "reduce_from_tensor_model_parallel_region": "tpkernels.layers.functional",
    "reduce_scatter_to_sequence_parallel_region": "tpkernels.layers.functional",
    "scatter_to_sequence_parallel_region": "tpkernels.layers.functional",
    "scatter_to_tensor_model_parallel_region": "tpkernels.layers.functional",
    "check_replicas": "tpkernels.layers.replicas",
    "finalize_gradients": "tpkernels.layers.replicas",
    "GPT": "tpkernels.models.gpt",
    "GPTConfig": "tpkernels.models.config",
    "model_config": "tpkernels.models.config",
    "reuse_quantized_weights": "tpkernels.ops.quantized.weights",
    "create_parallel_state": "tpkernels.runtime.initialize",
    "destroy_model_parallel": "tpkernels.runtime.initialize",
    "destroy_parallel_state": "tpkernels.runtime.initialize",
    "initialize_model_parallel": "tpkernels.runtime.initialize",
    "get_rng_tracker": "tpkernels.runtime.random",
    "manual_seed": "tpkernels.runtime.random",
    "ParallelState": "tpkernels.runtime.state",
    "ParallelStateError": "tpkernels.runtime.state",
    "current": "tpkernels.runtime.state",
    "use": "tpkernels.runtime.state",
    "GroupPlan": "tpkernels.topology.plan",
    "plan_groups": "tpkernels.topology.plan",
    "InvalidSizes": "tpkernels.topology.sizes",
    "tp_invariant": "tpkernels.tp_invariance",
}

__all__ = list(_HOME)

keep_former_names()


if not TYPE_CHECKING:  # a checker that saw it would believe every misspelt name

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'tpkernels' has no attribute {name!r}")
        return import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
