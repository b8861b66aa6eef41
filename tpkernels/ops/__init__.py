"""Differentiable operators: local or over a group, any leading dimensions, autocast, torch.compile."""

from tpkernels.ops.column_linear import column_linear as column_linear
from tpkernels.ops.linear import linear as linear
from tpkernels.ops.mlp import mlp as mlp
from tpkernels.ops.norm import layer_norm as layer_norm
from tpkernels.ops.norm import rms_norm as rms_norm
from tpkernels.ops.parallel_mlp import parallel_mlp as parallel_mlp
from tpkernels.ops.row_linear import row_linear as row_linear
from tpkernels.ops.swiglu import swiglu as swiglu
