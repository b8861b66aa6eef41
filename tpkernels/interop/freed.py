"""Tensors whose memory is given back while a model moves: they keep their shape, and every number is NaN.

A freed tensor is the same object as before, so optimizers and tied layers still hold it. All of its elements
are one: what computes with it finds NaN, and torch refuses most writes. `give_memory` makes it a tensor like
any other again, with arbitrary numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_freed(tensor: Tensor) -> bool:
    """Whether all elements of a plain tensor are one."""
    return tensor.numel() > 1 and not any(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def freed_like(
    tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """A freed tensor of this shape, or one of zeros where NaN is no number."""
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if not dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tensor.shape)


@torch.no_grad()
def free(tensor: Tensor) -> None:
    """Give back the memory of a plain tensor, unless it is a few bytes or holds no floating-point numbers."""
    if tensor.is_floating_point() and tensor.numel() > 1:
        torch.autograd.graph.increment_version(tensor)  # graphs that have saved it raise
        tensor.data = freed_like(tensor)


@torch.no_grad()
def give_memory(tensor: Tensor) -> None:
    """Let a freed tensor hold numbers again."""
    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def leave_meta_device(model: nn.Module, device: torch.device) -> None:
    """As `model.to_empty(device=device)`, with parameters that are freed tensors."""
    passing = {
        id(buffer)
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if name in owner._non_persistent_buffers_set  # which do not move: their module fills them
    }

    def on_device(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or isinstance(tensor, DTensor):
            return tensor
        if isinstance(tensor, nn.Parameter):
            return freed_like(tensor, device=device)
        if id(tensor) not in passing:
            return torch.empty_like(tensor, device=device)
        if tensor.is_floating_point():
            return torch.full_like(tensor, torch.nan, device=device)
        return tensor  # torch refuses to compute with it

    model._apply(on_device)


def refuse_shared(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise for tensors whose memory others may use, too, and which cannot be freed for this reason."""
    owners: dict[int, str] = {}
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"free_source: '{name}' is a DTensor, of whose memory fully_shard keeps a view; "
                "move without free_source"
            )
        storage = tensor.untyped_storage()
        first = owners.setdefault(storage.data_ptr(), name) if tensor.numel() else name
        if first != name or storage.nbytes() != tensor.numel() * tensor.element_size():
            other = f"'{first}'" if first != name else "what lies beside it in one buffer"
            raise ValueError(
                f"free_source: '{name}' shares memory with {other}, which may be used later; "
                "move without free_source"
            )
