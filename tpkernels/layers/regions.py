"""The seven regions under Megatron's names, over the current tensor-parallel group unless another is given.

What each does to activations and to gradients: `tpkernels/ops/tensor_parallel/mappings.py`.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.layers.world import State, group_of
from tpkernels.ops.tensor_parallel import mappings


def copy_to_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """As it is; gradients are summed over the ranks."""
    return mappings.copy_to_region(input_, group_of(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """The sum of the ranks' inputs, in a new tensor."""
    return mappings.reduce_from_region(input_, group_of(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """This rank's part of the last dimension."""
    return mappings.scatter_to_region(input_, group_of(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """The ranks' inputs, one after the other along the last dimension."""
    return mappings.gather_from_region(input_, group_of(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """This rank's part of dimension 0."""
    return mappings.scatter_to_sequence_region(input_, group_of(group))


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: State = None
) -> Tensor:
    """The ranks' inputs, one after the other along dimension 0.

    tensor_parallel_output_grad: what follows is split over the ranks, so that the gradient is the sum of
        what they have of it; if False, all have the whole gradient
    """
    return mappings.gather_from_sequence_region(
        input_, group_of(group), tensor_parallel_output_grad=tensor_parallel_output_grad
    )


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """This rank's part of dimension 0 of the sum of the ranks' inputs."""
    return mappings.reduce_scatter_to_sequence_region(input_, group_of(group))
