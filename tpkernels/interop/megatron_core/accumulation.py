"""Autograd functions that handle a weight's gradient where the product itself does not compute it.

The product takes the weight as a constant, and `y` passes through one of these functions, which gets dy.

    AddToMainGrad   main_grad += dyᵀ x
    KeepForLater    dy is appended to a list; Megatron computes dyᵀ x after the last backward

Both take the weight as `ops.main_grad.accumulating` gives it, which keeps Megatron's protocol of
`grad_added_to_main_grad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import Context, tokens_of
from tpkernels.ops.main_grad import weight_gradient

Passed = tuple[Tensor | None, None, None, None]


class AddToMainGrad(torch.autograd.Function):
    """Passes y on, and adds dyᵀ x to `main_grad` in backward."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, weight: Tensor, x: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.main_grad = main_grad
        return y.detach()  # a view would not let losses write to it

    @staticmethod
    def spmd_typecheck(*, y: Tensor, weight: Tensor, x: Tensor, main_grad: Tensor) -> Any:
        spmd_rules.ignore(weight, x, main_grad)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> Passed:
        (x,) = ctx.saved_tensors
        weight_gradient(tokens_of(dy), tokens_of(x), ctx.main_grad)
        return dy, None, None, None


class KeepForLater(torch.autograd.Function):
    """Passes y on, and appends dy to a list in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, dys: list[Tensor]) -> Tensor:
        ctx.dys = dys
        return y.detach()  # a view would not let losses write to it

    @staticmethod
    def spmd_typecheck(*, y: Tensor, weight: Tensor, dys: list[Tensor]) -> Any:
        spmd_rules.ignore(weight, *dys)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.dys.append(dy)
        return dy, None, None
