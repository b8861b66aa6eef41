"""Operands to time and check candidates on: random, laid out like the user's, and apart from them.

So a choice does not depend on what a batch happens to hold (zeros multiply faster, and prove nothing), and
what accumulates does so where nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.record import Primitive
from tpkernels.kernels.operands import FP8

ALIGNMENT = 16  # bytes; more of it decides nothing
FP8_SIZE = 64.0  # of elements in fp8: as if the largest of thousands had been scaled to 448


def scratch_like(arguments: tuple[Any, ...], depth: int, device: torch.device) -> tuple[Any, ...]:
    """The same arguments with other tensors, on `device`; the user's random stream is left alone.

    depth: length of the reduction; its fourth root keeps products at a size of one, within any dtype
    """
    generator = torch.Generator(device).manual_seed(0)
    scale = max(depth, 1) ** -0.25
    scaled = any(isinstance(argument, Tensor) and argument.dtype in FP8 for argument in arguments)
    return tuple(
        _scratch(argument, scale, scaled, generator) if isinstance(argument, Tensor) else argument
        for argument in arguments
    )


def _scratch(like: Tensor, scale: float, scaled: bool, generator: torch.Generator) -> Tensor:
    """scaled: beside matrices in fp8, those in fp32 are their scales"""
    offset = like.data_ptr() % ALIGNMENT // like.element_size()
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = torch.empty(extent, dtype=like.dtype, device=generator.device)
    if like.dtype in FP8:
        wide = torch.randn(extent, generator=generator, device=generator.device)
        memory.copy_(wide.mul_(FP8_SIZE).clamp_(-448, 448))
    elif scaled and like.ndim == 2 and like.dtype == torch.float32:
        memory.uniform_(0.5, 1.5, generator=generator).mul_(scale / FP8_SIZE)
    elif like.is_floating_point() and like.ndim == 1:
        # a bias is added to products of a size of one: a column that goes without it is far off
        memory.uniform_(0.5, 1.5, generator=generator)
    elif like.is_floating_point():
        memory.normal_(std=scale, generator=generator)
    else:
        memory.zero_()
    return memory.as_strided(like.shape, like.stride(), offset)


Results = tuple[Tensor | None, ...]


def results_of(record: Primitive[..., Any], run: Callable[..., Any], arguments: tuple[Any, ...]) -> Results:
    """What a candidate gives for these arguments, none of which stays changed."""
    if record.changes_first:
        changed, *others = arguments
        changed = changed.clone()
        run(changed, *others)
        return (changed,)
    results: Any = run(*arguments)
    return tuple(results) if isinstance(results, tuple) else (results,)


def spoil_freed(results: Results) -> None:
    """Leave NaN in freed memory of these sizes, which the next results of such sizes are given.

    It may hold right results of somebody else: what a candidate does not write would not show.
    """
    spoilt = [torch.full_like(one, torch.nan) for one in results if one is not None]
    del spoilt  # all at once, so that each has a block of its own
