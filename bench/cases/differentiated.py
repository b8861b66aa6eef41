"""Forward and backward of two functions of the same operands, one of them ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.case import Case, Work

Function = Callable[..., Tensor]


def differentiated(work: Work, ours: Function, naive: Function, operands: Sequence[Tensor]) -> Case:
    """operands: what both take, and what is differentiated by"""

    def way(function: Function) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y = function(*operands)
            return y.detach(), *torch.autograd.grad(y, operands, torch.ones_like(y))

        return run

    return Case(work, {"ours": way(ours), "naive": way(naive)})
