"""Until the last op has one autograd function."""

from __future__ import annotations

import torch
from torch import Tensor


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A result that was not asked for, as an operator has to return it."""
    return like.new_empty(0) if tensor is None else tensor


def dtype_of_sums(x: Tensor) -> torch.dtype:
    """fp32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)
