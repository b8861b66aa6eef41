"""Rotary position embedding: pairs of a head's features are turned by an angle that grows with the position.

Feature i is paired with feature i + d/2, as in Llama. Position t turns pair i by t / base^(2i / d).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Of each position and pair, (positions, head_size / 2)."""

    cos: Tensor
    sin: Tensor


def rotation(
    positions: int | Tensor,
    head_size: int,
    base: float = 10_000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Rotation:
    """The rotation of positions 0, 1, ..., or of the given ones.

    Angles are taken in float64: in float32 those of late positions are off in the fourth digit.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions, device=device)
    pairs = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[:, None] * base ** (-pairs / head_size)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x (positions, batch, heads, head_size) turned, in the dtype of the rotation, and rounded to its own."""
    expected = x.shape[0], x.shape[-1] // 2
    if any(tuple(part.shape) != expected for part in by):
        raise ValueError(
            f"rotary: expected the rotation of {expected[0]} positions and {expected[1]} pairs of features, "
            f"got {tuple(by.cos.shape)}"
        )
    cos, sin = (part[:, None, None, :] for part in by)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
