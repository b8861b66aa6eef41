"""Megatron's attributes of parameters: how they are sharded, and which gradients are partial.

tensor_model_parallel   True: each rank holds a shard; False: replicated
partition_dim           the dimension that is split; -1: none
partition_stride        the number of weights concatenated in this one, see `groups/sizes.py`
sequence_parallel       each rank's gradient is of its tokens only: partial, to be summed over the ranks
tensor_parallel_ranks   ours: the global ranks of the tensor group; empty where they are not known

Kept for Megatron's optimizers and buckets, as callers set them:

allreduce               False: of an expert; its gradient is summed over the expert data-parallel ranks
expert_tp               split over the expert tensor-parallel ranks
is_qkv                  rows of queries, keys and values, in groups of `qkv_split_shapes` rows
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torch import Tensor

from tpkernels.groups.state import current_or_none
from tpkernels.layers.world import State, tensor_world


@dataclass(frozen=True)
class Attributes:
    """Megatron's attributes of one parameter; by default replicated, with a full gradient."""

    tensor_model_parallel: bool = False
    partition_dim: int = -1
    partition_stride: int = 1
    sequence_parallel: bool = False
    allreduce: bool = True
    expert_tp: bool = False
    is_qkv: bool = False
    qkv_split_shapes: list[int] | None = None
    tensor_parallel_ranks: tuple[int, ...] = field(default=(), compare=False)

    @staticmethod
    def of(tensor: Tensor) -> Attributes:
        """Return the attributes of `tensor`; missing ones have their defaults."""
        found = vars(tensor)  # a plain tensor has none of them
        return Attributes(**{name: found[name] for name in Attributes.__dataclass_fields__ if name in found})

    def put_on(self, tensor: Tensor) -> None:
        """Set the attributes that `tensor` does not have yet."""
        for name, value in asdict(self).items():
            vars(tensor).setdefault(name, value)


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark `tensor` as split along `dim`; raise if it already has other marks."""
    marks = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in marks.items():
        if vars(tensor).get(name, value) != value:
            raise ValueError(
                f"{name}: expected {vars(tensor)[name]!r}, with which this tensor is marked already, "
                f"got {value!r}"
            )
    vars(tensor).update(marks)
    state = current_or_none()
    if is_parallel and state is not None:
        vars(tensor)["tensor_parallel_ranks"] = tuple(state.ranks("tp"))


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark `tensor` as replicated where it has no mark."""
    Attributes.of(tensor).put_on(tensor)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy all attributes of the source, for example to a parameter's fp32 copy."""
    names = Attributes.__dataclass_fields__
    vars(destination_tensor).update({k: v for k, v in vars(source_tensor).items() if k in names})


def param_is_not_tensor_parallel_duplicate(param: Tensor, state: State = None) -> bool:
    """Whether this rank counts `param`: shards count on every rank, replicated parameters on the first."""
    return Attributes.of(param).tensor_model_parallel or tensor_world(state).rank == 0
