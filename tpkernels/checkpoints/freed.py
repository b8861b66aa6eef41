"""Frees the memory of tensors while a model moves: they keep their shape, and every element is NaN.

A freed tensor is the same object as before, so optimizers and tied layers still hold it. All of its elements
are one NaN in memory: computing with it gives NaN, and torch refuses most writes. An optimizer step on it is
refused, because fused optimizers ignore strides. `give_memory` makes it a tensor like any other again, with
arbitrary values.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def is_freed(tensor: Tensor) -> bool:
    """Whether a plain tensor, or its base, was freed."""
    if not tensor.ndim or not tensor.numel() or any(tensor.stride()):
        return False
    return bool(tensor.detach()[(0,) * tensor.ndim].isnan())


def freed_like(
    tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """Return a freed tensor of this shape, or zeros if its dtype has no NaN."""
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if not dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    _stop_optimizers()
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tensor.shape)


@torch.no_grad()
def free(tensor: Tensor) -> None:
    """Free the memory of a plain floating-point tensor and of its gradient."""
    if tensor.is_floating_point() and tensor.numel() > 1:
        torch.autograd.graph.increment_version(tensor)  # graphs that have saved it raise
        tensor.data = freed_like(tensor)
        tensor.grad = None  # so optimizers skip it


@torch.no_grad()
def give_memory(tensor: Tensor) -> None:
    """Give a freed tensor memory again, with arbitrary values."""
    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@cache
def _stop_optimizers() -> None:
    """Refuse steps of any optimizer on freed tensors; called when the first tensor is freed."""
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            held = [parameter, *optimizer.state.get(parameter, {}).values()]
            # subclasses may have no strides of their own to ask for, and are never freed
            if any(type(each) in (Tensor, nn.Parameter) and is_freed(each) for each in held):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: a parameter of shape {tuple(parameter.shape)}, or its "
                    "state, was freed by reshard(free_source=True); move the model and its optimizer's state "
                    "back before"
                )


def leave_meta_device(model: nn.Module, device: torch.device) -> None:
    """As `model.to_empty(device=device)`, but parameters become freed tensors and stay the same objects.

    So an optimizer built over them stays valid.
    """
    for name, parameter in model.named_parameters():
        if _is_plain_meta(parameter):
            _leave_meta(name, parameter, device)
    for owner in model.modules():
        if any(map(_is_plain_meta, owner._buffers.values())):  # others may have DTensors, which it replaces
            owner._apply(partial(_with_memory, owner, device), recurse=False)


def _leave_meta(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"'{name}' is on the meta device and has hooks, which it would lose; register them "
            "once the model is filled"
        )
    kind, attributes = type(parameter), vars(parameter)
    freed = nn.Parameter(freed_like(parameter, device=device), parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, freed)
    except RuntimeError as error:
        raise ValueError(f"'{name}' is on the meta device, and something else holds it: {error}") from error
    parameter.__class__, parameter.__dict__ = kind, attributes


def _with_memory(owner: nn.Module, device: torch.device, tensor: Tensor) -> Tensor:
    """Return a buffer with memory for one on the meta device; a buffer that does not move becomes NaN."""
    if not _is_plain_meta(tensor):
        return tensor
    if not any(owner._buffers.get(name) is tensor for name in owner._non_persistent_buffers_set):
        return torch.empty_like(tensor, device=device)
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan, device=device)
    return tensor  # torch refuses to compute with it


def _is_plain_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta and not isinstance(tensor, DTensor)


def require_freeable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for tensors that share memory with other tensors, and so cannot be freed."""
    owners: dict[int, str] = {}
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"free_source: '{name}' is a DTensor, and fully_shard keeps a view of its memory; "
                "move without free_source"
            )
        storage = tensor.untyped_storage()
        first = owners.setdefault(storage.data_ptr(), name) if tensor.numel() else name
        if first != name or storage.nbytes() != tensor.numel() * tensor.element_size():
            other = f"'{first}'" if first != name else "the rest of its buffer"
            raise ValueError(
                f"free_source: '{name}' shares memory with {other}, which may be used later; "
                "move without free_source"
            )
