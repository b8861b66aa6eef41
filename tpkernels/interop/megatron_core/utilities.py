"""Megatron's functions to shard the elements of a tensor, to mark parameters, and its loss."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpkernels.groups.sizes import shard_size
from tpkernels.layers import attributes, functional
from tpkernels.layers.world import State, group_of, tensor_world


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
