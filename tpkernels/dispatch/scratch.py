"""Operands to time and check candidates on: random, laid out like the user's, and apart from them.

So a choice does not depend on what a batch happens to hold (zeros multiply faster, and prove nothing), and
what accumulates does so where nobody looks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; more of it decides nothing


def scratch_like(arguments: tuple[Any, ...], depth: int, device: torch.device) -> tuple[Any, ...]:
    """The same arguments with other tensors, on `device`; the user's random stream is left alone.

    depth: length of the reduction; its fourth root keeps products at a size of one, within any dtype
    """
    generator = torch.Generator(device).manual_seed(0)
    scale = max(depth, 1) ** -0.25
    return tuple(
        _scratch(argument, scale, generator) if isinstance(argument, Tensor) else argument
        for argument in arguments
    )


def _scratch(like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    offset = like.data_ptr() % ALIGNMENT // like.element_size()
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = torch.empty(extent, dtype=like.dtype, device=generator.device)
    memory.normal_(std=scale, generator=generator)
    return memory.as_strided(like.shape, like.stride(), offset)
