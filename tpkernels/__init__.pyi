__version__: str

from tpkernels import interop as interop
from tpkernels import ops as ops
from tpkernels import optim as optim
from tpkernels import parallel_state as parallel_state
from tpkernels import testing as testing
from tpkernels.buckets.collectives import bucketed_all_gather as bucketed_all_gather
from tpkernels.buckets.collectives import bucketed_all_reduce_ as bucketed_all_reduce_
from tpkernels.buckets.collectives import bucketed_broadcast_ as bucketed_broadcast_
from tpkernels.buckets.collectives import bucketed_reduce_scatter as bucketed_reduce_scatter
from tpkernels.buckets.gradients import GradientBuckets as GradientBuckets
from tpkernels.comm.dump import dump_calls as dump_calls
from tpkernels.explanation import explain as explain
from tpkernels.groups.initialize import create_parallel_state as create_parallel_state
from tpkernels.groups.initialize import destroy_model_parallel as destroy_model_parallel
from tpkernels.groups.initialize import destroy_parallel_state as destroy_parallel_state
from tpkernels.groups.initialize import initialize_model_parallel as initialize_model_parallel
from tpkernels.groups.plan import GroupPlan as GroupPlan
from tpkernels.groups.plan import plan_groups as plan_groups
from tpkernels.groups.random import get_rng_tracker as get_rng_tracker
from tpkernels.groups.random import manual_seed as manual_seed
from tpkernels.groups.sizes import InvalidSizes as InvalidSizes
from tpkernels.groups.state import ParallelState as ParallelState
from tpkernels.groups.state import ParallelStateError as ParallelStateError
from tpkernels.groups.state import current as current
from tpkernels.groups.state import use as use
from tpkernels.interop.parallelize import parallelize as parallelize
from tpkernels.interop.renamed_shards import reshard as reshard
from tpkernels.interop.typecheck import typecheck as typecheck
from tpkernels.kernels.recipe import Recipe as Recipe
from tpkernels.layers.attention import ParallelAttention as ParallelAttention
from tpkernels.layers.block import ParallelMLP as ParallelMLP
from tpkernels.layers.block import TransformerBlock as TransformerBlock
from tpkernels.layers.check import check as check
from tpkernels.layers.checkpoint import checkpoint as checkpoint
from tpkernels.layers.clip import clip_grad_norm_ as clip_grad_norm_
from tpkernels.layers.functional import LossMetrics as LossMetrics
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
from tpkernels.layers.functional import linear_logprobs as linear_logprobs
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
from tpkernels.layers.linear import VocabParallelEmbedding as VocabParallelEmbedding
from tpkernels.layers.norm import LayerNorm as LayerNorm
from tpkernels.layers.norm import RMSNorm as RMSNorm
from tpkernels.layers.options import LayerOptions as LayerOptions
from tpkernels.layers.replicas import check_replicas as check_replicas
from tpkernels.layers.replicas import finalize_gradients as finalize_gradients
from tpkernels.models.config import GPTConfig as GPTConfig
from tpkernels.models.config import model_config as model_config
from tpkernels.models.gpt import GPT as GPT
from tpkernels.ops.quantized.weights import reuse_quantized_weights as reuse_quantized_weights
from tpkernels.tp_invariance import tp_invariant as tp_invariant
