"""Megatron's functions to split, gather and broadcast tensors, to mark parameters, and its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.groups.sizes import InvalidSizes, shard_size
from tpkernels.layers import attributes, functional
from tpkernels.layers.world import State, group_of, tensor_world


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise unless `denominator` divides `numerator`."""
    if numerator % denominator:
        raise InvalidSizes(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient; raise if it is not exact."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dimension into equal views, or contiguous copies."""
    chunks = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: State = None
) -> Tensor:
    """Return this rank's equal shard of the elements, as a view or a copy."""
    world = tensor_world(tp_group)
    size = shard_size(tensor.numel(), world.size, "the number of elements")
    chunk = tensor.view(-1)[size * world.rank : size * (world.rank + 1)]
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: State = None) -> Tensor:
    """All-gather the elements that `split_tensor_into_1d_equal_chunks` has split."""
    group = group_of(tp_group)
    gathered = tensor.new_empty(tensor.numel() * group.size())
    dist.all_gather_into_tensor(gathered, tensor.detach().reshape(-1).contiguous(), group=group)
    return gathered


class VocabUtility:
    """First and last + 1 id of a rank's equal shard of the vocabulary."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return a rank's range, from the number of ids of each rank."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return a rank's range, from the number of all ids."""
        each = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(each, rank, world_size)


def broadcast_data(
    keys: Sequence[Any], data: Mapping[Any, Tensor], datatype: torch.dtype, tp_group: State = None
) -> dict[Any, Tensor]:
    """Broadcast data[key] from the group's first rank to all its ranks, on the current GPU if there is one.

    keys: the same on all ranks; data: read on the first rank only
    datatype: of all these tensors
    """
    group = group_of(tp_group)
    said = [_shapes(keys, data, datatype) if group.rank() == 0 else None]
    dist.broadcast_object_list(said, group_src=0, group=group)
    shapes = said[0]
    if not isinstance(shapes, list):  # all ranks raise
        raise ValueError(f"broadcast_data: {shapes}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    sizes = [torch.Size(shape).numel() for _, shape in shapes]
    if group.rank() == 0 and keys:
        flat = torch.cat([data[key].detach().to(device).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(sizes), dtype=datatype, device=device)
    dist.broadcast(flat, group_src=0, group=group)
    said_keys = [key for key, _ in shapes]
    if said_keys != list(keys):  # after the last collective, so that no other rank waits for this one
        raise ValueError(f"broadcast_data: expected the first rank's keys {said_keys}, got {list(keys)}")
    return {key: part.view(shape) for (key, shape), part in zip(shapes, flat.split(sizes), strict=True)}


def _shapes(
    keys: Sequence[Any], data: Mapping[Any, Tensor], datatype: torch.dtype
) -> list[tuple[Any, tuple[int, ...]]] | str:
    """Return each key with its shape, or the problem in words."""
    for key in keys:
        if key not in data:
            return f"expected {key!r} in data of the first rank, which has {list(data)}"
        if data[key].dtype != datatype:
            return f"expected data[{key!r}] of {datatype}, got {data[key].dtype}"
    return [(key, tuple(data[key].shape)) for key in keys]


set_tensor_model_parallel_attributes = attributes.set_tensor_model_parallel_attributes
set_defaults_if_not_set_tensor_model_parallel_attributes = (
    attributes.set_defaults_if_not_set_tensor_model_parallel_attributes
)
copy_tensor_model_parallel_attributes = attributes.copy_tensor_model_parallel_attributes


def param_is_not_tensor_parallel_duplicate(
    param: Tensor, tp_group: State = None, *, expert_tp_group: State = None
) -> bool:
    """Whether this rank counts `param`: shards count on every rank, replicated parameters on the first.

    tp_group, expert_tp_group: a state, or an object with a rank(); for an expert's parameter
        (allreduce=False) expert_tp_group counts, if it is given
    """
    said = attributes.Attributes.of(param)
    group: Any = tp_group if said.allreduce or expert_tp_group is None else expert_tp_group
    if said.tensor_model_parallel or not callable(getattr(group, "rank", None)):
        return attributes.param_is_not_tensor_parallel_duplicate(param, group)
    return bool(group.rank() == 0)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: State = None
) -> Tensor:
    """Compute the loss of each token. vocab_parallel_logits: (..., this rank's columns)"""
    return functional.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing, group=tp_group
    )
