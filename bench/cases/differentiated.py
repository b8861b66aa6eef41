"""Forward, with backward or without, of functions of the same operands, one of them ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.case import Case, Work

Function = Callable[..., Tensor]


def differentiated(
    work: Work, ours: Function, naive: Function, operands: Sequence[Tensor], **others: Function
) -> Case:
    """A case of `work.pass_`: forward (kept for backward), forward_backward, or inference.

    operands: what all take, and what is differentiated by; others: further ways
    """

    def way(function: Function) -> Callable[[], tuple[Tensor, ...]]:
        def forward() -> tuple[Tensor, ...]:
            return (function(*operands).detach(),)

        def forward_backward() -> tuple[Tensor, ...]:
            y = function(*operands)
            return y.detach(), *torch.autograd.grad(y, operands, torch.ones_like(y))

        def inference() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return forward()

        return {"forward": forward, "forward_backward": forward_backward, "inference": inference}[work.pass_]

    return Case(work, {name: way(f) for name, f in {"ours": ours, "naive": naive, **others}.items()})
