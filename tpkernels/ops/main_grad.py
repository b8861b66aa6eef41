"""Gradient accumulation into `main_grad`: the weight's gradient is added there, and autograd gets none."""

from __future__ import annotations

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


def weight_gradient(steps: Steps, dy: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """dyᵀ x, or None if it was added to `main_grad`."""
    if main_grad is None:
        return steps.wgrad(dy, x)
    steps.wgrad_accumulate_(main_grad, dy, x)
    return None


def require_no_main_grad(op: str, main_grad: Tensor | None) -> None:
    """torch.compile traces backward as a function of its inputs, which may not change one of them."""
    if main_grad is not None:
        raise ValueError(
            f"{op}: expected no main_grad under torch.compile; accumulate from weight.grad, or run eagerly"
        )
