"""Dropout that draws alike on tensor-parallel ranks where they hold the same, and apart where they do not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.runtime.random import get_rng_tracker


def own_stream(is_split: bool) -> AbstractContextManager[None]:
    """Draw from this rank's own stream, if what it holds is a part that no other rank has."""
    return get_rng_tracker().fork() if is_split else nullcontext()


class ParallelDropout(nn.Module):
    """Zero each element with probability `p`, and scale the others up; in training only.

    is_split: each rank's input is a part of its own, and so is what it draws
    """

    def __init__(self, p: float, *, is_split: bool) -> None:
        super().__init__()
        self.p = require_probability("p", p)
        self.is_split = is_split

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        with own_stream(self.is_split):
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, is_split={self.is_split}"


def require_probability(name: str, p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: expected a probability from 0 to 1, got {p}")
    return p
