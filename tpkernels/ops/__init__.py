"""Differentiable operators on local tensors: any leading dimensions, any strides, autocast, torch.compile."""

from tpkernels.ops.linear import linear as linear
from tpkernels.ops.mlp import mlp as mlp
from tpkernels.ops.swiglu import swiglu as swiglu
