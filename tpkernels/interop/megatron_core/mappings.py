"""Megatron's `tensor_parallel.mappings`: regions of a group, also with shards of unequal size.

Unequal shards are padded to the longest before they are sent. use_global_buffer has no effect: results are
new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, _functional_collectives
from torch.nn.functional import pad

from tpkernels.layers import functional
from tpkernels.layers.functional import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tpkernels.layers.world import State, group_of, tensor_world

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: State = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All-gather the ranks' inputs along dimension 0.

    output_split_sizes: each rank's rows; None: the same number
    """
    if output_split_sizes is None:
        return functional.gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad, group)
    sizes = _checked(output_split_sizes, group)
    own = sizes[tensor_world(group).rank]
    if input_.shape[0] != own:
        raise ValueError(f"expected {own} rows, as output_split_sizes says, got {tuple(input_.shape)}")
    padded = functional.gather_from_sequence_parallel_region(
        _padded(input_, max(sizes)), tensor_parallel_output_grad, group
    )
    chunks = padded.split(max(sizes)) if max(sizes) else [padded] * len(sizes)
    return torch.cat([chunk[:size] for chunk, size in zip(chunks, sizes, strict=True)])


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: State = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Reduce-scatter the ranks' inputs along dimension 0.

    input_split_sizes: each rank's rows; None: the same number
    """
    if input_split_sizes is None:
        return functional.reduce_scatter_to_sequence_parallel_region(input_, group)
    sizes = _checked(input_split_sizes, group)
    if input_.shape[0] != sum(sizes):
        raise ValueError(f"expected {sum(sizes)} rows, as input_split_sizes says, got {tuple(input_.shape)}")
    starts = [0, *accumulate(sizes)]
    chunks = [_padded(input_[at : at + size], max(sizes)) for at, size in zip(starts, sizes, strict=False)]
    summed = functional.reduce_scatter_to_sequence_parallel_region(torch.cat(chunks), group)
    return summed[: sizes[tensor_world(group).rank]]


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """All-gather the ranks' inputs along the last dimension; backward reduce-scatters the gradient."""
    gathered = functional.gather_from_sequence_parallel_region(_last_first(input_), True, group)
    return gathered.movedim(0, -1)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """Reduce-scatter the ranks' inputs along the last dimension."""
    return functional.reduce_scatter_to_sequence_parallel_region(_last_first(input_), group).movedim(0, -1)


def all_to_all(
    group: ProcessGroup,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Send rows to every rank, and return the rows received from every rank.

    output_split_sizes_, input_split_sizes: rows from and to each rank; None: the same number
    use_nccl_stream: an argument of later sources than 0.16; no effect: rows travel on the group's stream
    """
    ranks = group.size()
    if ranks == 1:
        return input_
    if input_split_sizes is None and input_.shape[0] % ranks:
        raise ValueError(f"expected rows that {ranks} ranks divide, got {tuple(input_.shape)}")
    even = [input_.shape[0] // ranks] * ranks
    sent = even if input_split_sizes is None else [int(size) for size in input_split_sizes]
    received = even if output_split_sizes_ is None else [int(size) for size in output_split_sizes_]
    return _functional_collectives.all_to_all_single_autograd(input_.contiguous(), received, sent, group)


def all_to_all_sp2hp(input_: Tensor, group: State = None) -> Tensor:
    """Exchange this rank's tokens (tokens / ranks, features) for its features (tokens, features / ranks)."""
    own = group_of(group)
    rows = input_.reshape(-1, input_.shape[-1])
    return all_to_all(own, torch.cat(_even(rows, own.size(), dim=-1)))


def all_to_all_hp2sp(input_: Tensor, group: State = None) -> Tensor:
    """Exchange this rank's features (tokens, features / ranks) for its tokens (tokens / ranks, features)."""
    own = group_of(group)
    rows = all_to_all(own, input_.reshape(-1, input_.shape[-1]))
    return torch.cat(_even(rows, own.size(), dim=0), dim=-1)


def _even(x: Tensor, ranks: int, dim: int) -> tuple[Tensor, ...]:
    if x.shape[dim] % ranks:
        raise ValueError(f"expected a dimension {dim} that {ranks} ranks divide, got {tuple(x.shape)}")
    return x.tensor_split(ranks, dim=dim)


def _checked(sizes: Sequence[int], group: State) -> list[int]:
    """Return the sizes as integers, one for each rank."""
    found = [int(size) for size in sizes]
    ranks = tensor_world(group).size
    if len(found) != ranks or min(found) < 0:
        raise ValueError(f"expected the rows of each of {ranks} ranks, got {found}")
    return found


def _padded(x: Tensor, rows: int) -> Tensor:
    return pad(x, [0] * (2 * x.dim() - 1) + [rows - x.shape[0]])


def _last_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous()
