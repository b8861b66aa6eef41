"""An op and `F.linear` on products so tiny that the host's time is what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Computation
from tpkernels import ops

PASSES = ("forward", "forward_backward", "inference")


def ways(pass_: str, device: str) -> Mapping[str, Computation]:
    """The ways of a pass; for inference they are called without gradients."""
    shapes = (4, 16), (16, 16), (16,)
    operands = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    dy = torch.ones(4, 16, device=device)

    def way(linear: Callable[..., Tensor]) -> Computation:
        def forward() -> Sequence[Tensor]:
            return (linear(*operands),)

        def forward_backward() -> Sequence[Tensor]:
            return torch.autograd.grad(linear(*operands), operands, dy)

        return forward_backward if pass_ == "forward_backward" else forward

    return {"ours": way(ops.linear), "naive": way(F.linear)}
