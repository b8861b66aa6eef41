"""Gradient accumulation into `main_grad`: the weight's gradient is added there, and autograd gets none.

Megatron's protocol asks for more where a weight has `grad_added_to_main_grad`: that is set to True, and
autograd gets a gradient for form's sake, so that hooks run. It holds zeros if the weight has
`zero_out_wgrad`, else whatever lay in memory; whoever gave the weight that attribute drops it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.tuning.steps import Steps


def check_main_grad(op: str, main_grad: Tensor | None, weight: Tensor) -> None:
    """main_grad: of the weight's shape, on its device"""
    if main_grad is None:
        return
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{op}: expected main_grad {tuple(weight.shape)} on {weight.device} like the weight, got "
            f"{tuple(main_grad.shape)} on {main_grad.device}"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{op}: expected a main_grad that requires no gradient itself; detach it")


def accumulating(weight: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """The weight as an op is to take it, and its `main_grad`.

    owner: whose weight it is, for the error where there is no `main_grad`
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{owner}: expected weight.main_grad with gradient_accumulation_fusion, a tensor of shape "
            f"{tuple(weight.shape)} that gradients are added to; assign one before the forward, or let "
            "GradientBuckets(..., main_grad=True) do it"
        )
    if hasattr(weight, "grad_added_to_main_grad"):
        weight = _SayItWasAdded.apply(weight)  # type: ignore[no-untyped-call]
    return weight, main_grad


class _SayItWasAdded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        assert gradient is None, "it was added to main_grad"
        ctx.weight.grad_added_to_main_grad = True
        zeros = getattr(ctx.weight, "zero_out_wgrad", False)
        return torch.zeros_like(ctx.weight) if zeros else torch.empty_like(ctx.weight)


def weight_gradient(steps: Steps, dy: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """dyᵀ x, or None if it was added to `main_grad`."""
    if main_grad is None:
        return steps.wgrad(dy, x)
    steps.wgrad_accumulate_(main_grad, dy, x)
    return None


class WeightGradient:
    """dyᵀ x, of some tokens after the others: summed in fp32 or wider, and rounded once."""

    def __init__(self, main_grad: Tensor | None) -> None:
        self._main_grad = main_grad
        self._sum: Tensor | None = None  # main_grad itself where that is wide enough

    def add(self, steps: Steps, dy: Tensor, x: Tensor) -> None:
        if self._sum is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            if self._main_grad is not None and self._main_grad.dtype == wide:
                self._sum = self._main_grad
            else:
                self._sum = dy.new_zeros(dy.shape[1], x.shape[1], dtype=wide)
            self._dtype = x.dtype
        steps.wgrad_accumulate_(self._sum, dy, x)

    def get(self) -> Tensor | None:
        """None if it was added to main_grad."""
        assert self._sum is not None, "this rank's own tokens always come, if there are none"
        if self._main_grad is None:
            return self._sum.to(self._dtype)
        if self._sum is not self._main_grad:
            self._main_grad += self._sum
        return None


def require_no_main_grad(op: str, main_grad: Tensor | None) -> None:
    """torch.compile traces backward as a function of its inputs, which may not change one of them."""
    if main_grad is not None:
        raise ValueError(
            f"{op}: expected no main_grad under torch.compile; accumulate from weight.grad, or run eagerly"
        )
