"""Sums and comparisons of tensors that ranks hold replicas of, after their descriptions were compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import Claim, agree, describe
from tpkernels.comm.groups import exchange_device, failed, required_group, start_broadcast
from tpkernels.comm.groups import mixing_of as mixing_of
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region, reduce_from_region

_CHUNK_BYTES = 2**25


def agree_on(request: str, named: Sequence[tuple[str, Tensor | None]], group: ProcessGroup) -> None:
    """Raise the same error on all ranks unless all pass tensors of these names, shapes and dtypes.

    Strides may differ: elements are taken in order.
    """
    claims = [
        f"'{name}' without one" if tensor is None else describe(name, tensor, strides=False)
        for name, tensor in named
    ]
    agree(Claim(request, tuple(claims)), required_group(group))


def agree_on_data(request: str, described: Sequence[str], group: ProcessGroup) -> None:
    """Raise the same error on all ranks unless all have read the same data, by their descriptions."""
    agree(Claim(request, tuple(described), is_data=True), group)


@torch.no_grad()
def differs_between_ranks(number: Tensor, group: ProcessGroup) -> Tensor:
    """Whether `number` differs between ranks: a scalar on the device from which the group sends."""
    numbers = from_all_ranks((number.to(exchange_device(group)) if number.is_cpu else number)[None], group)
    return (numbers != numbers[0]).any()


@torch.no_grad()
def sum_over_ranks_(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """All-reduce tensors in place, with the same bits on all ranks."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        total = reduce_from_region(torch.cat([tensor.reshape(-1) for tensor in alike]), group)
        parts = total.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(alike, [p.view(t.shape) for p, t in zip(parts, alike, strict=True)])


@torch.no_grad()
def from_all_ranks(numbers: Tensor, group: ProcessGroup) -> Tensor:
    """Gather (n,) of each rank to (ranks, n)."""
    with unobserved():
        return gather_from_sequence_region(numbers[None], group)


@torch.no_grad()
def unlike_first_rank(tensors: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Whether each rank's tensors differ in any bit from the first rank's: (ranks, tensors)."""
    firsts = _first_rank_bits(tensors, group)
    unlike = [not torch.equal(_bits(ours), first) for ours, first in zip(tensors, firsts, strict=True)]
    return from_all_ranks(torch.tensor(unlike, dtype=torch.uint8, device=tensors[0].device), group).bool()


@torch.no_grad()
def copy_first_rank_(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Overwrite tensors with those of the first rank."""
    for tensor, first in zip(tensors, _first_rank_bits(tensors, group), strict=True):
        # cloned, for in the chunk it may start where no element of a wider dtype may
        tensor.copy_(first.clone().view(tensor.dtype).view(tensor.shape))


def _first_rank_bits(tensors: Sequence[Tensor], group: ProcessGroup) -> Iterator[Tensor]:
    """Yield the first rank's bytes of each tensor in turn, broadcast in chunks of several tensors."""
    waiting: list[Tensor] = []
    for position, tensor in enumerate(tensors, 1):
        waiting.append(_bits(tensor))
        if position == len(tensors) or sum(map(len, waiting)) >= _CHUNK_BYTES:
            chunk = torch.cat(waiting)
            try:
                start_broadcast(group, chunk, 0).wait()
            except RuntimeError as error:
                what = "broadcast of the first rank's tensors"
                raise failed(what, group.group_name, group.size(), error) from error
            yield from chunk.split([len(bits) for bits in waiting])
            waiting.clear()


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as bytes, in which a NaN equals itself and zero differs from minus zero."""
    return tensor.contiguous().resolve_neg().view(-1).view(torch.uint8)
