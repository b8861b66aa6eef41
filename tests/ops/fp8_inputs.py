"""Matrices whose numbers are hard to quantize."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FEW = 8


def _few_times(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        x[:, :FEW] *= factor
        return x

    return scaled


def _zero_rows(x: Tensor) -> Tensor:
    x[::2] = 0
    return x


def _log_normal(x: Tensor) -> Tensor:
    return x * torch.exp(2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "log-normal sizes": _log_normal,
    "8 features times 100": _few_times(1e2),
    "8 features times 100,000": _few_times(1e5),
    "every second row zero": _zero_rows,
    "rows of 1e30": lambda x: x * 1e30,
    "rows of 1e-30": lambda x: x * 1e-30,
    "rows of 1e-40": lambda x: x * 1e-40,
}


def matrix(name: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Return an fp32 matrix of a distribution."""
    normal = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return DISTRIBUTIONS[name](normal)
