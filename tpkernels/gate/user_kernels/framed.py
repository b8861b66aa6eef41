"""Tensors inside frames: what is read outside of one is NaN, and what is written outside of one shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MARGIN = 65_536  # elements on each side: tiles that reach over an edge stay within


@dataclass(frozen=True)
class Framed:
    """A view of a buffer, with the buffer as it was."""

    view: Tensor
    buffer: Tensor
    before: Tensor

    @staticmethod
    def around(values: Tensor, strides: tuple[int, ...]) -> Framed:
        """values: what the view shall hold, of any strides itself"""
        reach = 1 + sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True))
        buffer = torch.empty(reach + 2 * MARGIN, dtype=values.dtype)
        buffer.fill_(outside(values.dtype))
        view = buffer.as_strided(values.shape, strides, MARGIN)
        view.copy_(values)
        return Framed(view, buffer, buffer.clone())

    def written_outside(self) -> bool:
        """Whether anything around the view, or between its rows, is not as it was."""
        after, before = self.buffer.clone(), self.before.clone()
        for one in (after, before):
            one.as_strided(self.view.shape, self.view.stride(), MARGIN).zero_()
        return not torch.equal(_bits(after), _bits(before))

    def changed(self) -> bool:
        """Whether anything in it is."""
        there = self.before.as_strided(self.view.shape, self.view.stride(), MARGIN)
        return not torch.equal(_bits(self.view.contiguous()), _bits(there.contiguous()))


def outside(dtype: torch.dtype) -> float | int | bool:
    """What nobody should read: NaN, or the largest integer."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
