"""Differentiable operators: local or over a group, any leading dimensions, autocast, torch.compile."""

from tpkernels.ops.linear import linear as linear
from tpkernels.ops.mlp import mlp as mlp
from tpkernels.ops.norm import layer_norm as layer_norm
from tpkernels.ops.norm import rms_norm as rms_norm
from tpkernels.ops.swiglu import swiglu as swiglu
from tpkernels.ops.tensor_parallel.column_linear import column_linear as column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp as parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear as row_linear
from tpkernels.ops.vocab.cross_entropy import vocab_cross_entropy as vocab_cross_entropy
from tpkernels.ops.vocab.embedding import vocab_embedding as vocab_embedding
from tpkernels.ops.vocab.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from tpkernels.ops.vocab.linear_cross_entropy import linear_logprobs as linear_logprobs
from tpkernels.ops.vocab.sampling import vocab_argmax as vocab_argmax
from tpkernels.ops.vocab.sampling import vocab_gather as vocab_gather
from tpkernels.ops.vocab.sampling import vocab_sample as vocab_sample
