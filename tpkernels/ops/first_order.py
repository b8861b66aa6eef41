"""Backward functions whose own derivative is an error, at no cost where nobody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


def first_order(backward: Backward) -> Backward:
    """torch's `once_differentiable`, entered only where a second derivative is being prepared.

    Gradients are off in an ordinary backward, and switching them off again takes as long as a tiny product.
    """
    guarded: Backward = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
