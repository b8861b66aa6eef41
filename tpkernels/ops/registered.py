"""The steps as operators of torch's dispatcher: what `torch.compile` sees instead of Triton launches.

The contract is `tuning.steps.Steps`, but a result that was not asked for is an empty tensor: an operator
returns as many tensors whatever its arguments. An eager call goes round the dispatcher, which would cost more
than a small product does.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tpkernels.dispatch.steps import Norm, steps_on
from tpkernels.kernels.activations import Activation, Glu


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A result that was not asked for, as an operator has to return it."""
    return like.new_empty(0) if tensor is None else tensor


def dtype_of_sums(x: Tensor) -> torch.dtype:
    """fp32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.custom_op("tpkernels::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_z: bool
) -> tuple[Tensor, Tensor]:
    keep_z = keep_z and activation != "none"  # z would be y itself, and an operator may not return that twice
    y, z = steps_on(x.device).linear(x, weight, bias, cast("Activation", activation), keep_z)
    return y, or_empty(z, y)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_z: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if keep_z and activation != "none" else x.new_empty(0)


@torch.library.custom_op("tpkernels::glu", mutates_args=())
def glu(x: Tensor, w_gate: Tensor, w_up: Tensor, kind: str, keep_gu: bool) -> tuple[Tensor, Tensor, Tensor]:
    h, g, u = steps_on(x.device).glu(x, w_gate, w_up, cast("Glu", kind), keep_gu)
    return h, or_empty(g, h), or_empty(u, h)


@glu.register_fake
def _(x: Tensor, w_gate: Tensor, w_up: Tensor, kind: str, keep_gu: bool) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty(x.shape[0], w_gate.shape[0])
    if keep_gu:
        return h, torch.empty_like(h), torch.empty_like(h)
    return h, x.new_empty(0), x.new_empty(0)


@torch.library.custom_op("tpkernels::dgrad", mutates_args=())
def dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    return steps_on(dy.device).dgrad(dy, weight)


@dgrad.register_fake
def _(dy: Tensor, weight: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1])


@torch.library.custom_op("tpkernels::dgrad_act", mutates_args=())
def dgrad_act(
    dy: Tensor, weight: Tensor, z: Tensor, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    dz, db = steps_on(dy.device).dgrad_act(dy, weight, z, cast("Activation", activation), bias_grad)
    return dz, dz.new_empty(0, dtype=dtype_of_sums(dz)) if db is None else db


@dgrad_act.register_fake
def _(dy: Tensor, weight: Tensor, z: Tensor, activation: str, bias_grad: bool) -> tuple[Tensor, Tensor]:
    dz = dy.new_empty(dy.shape[0], weight.shape[1])
    return dz, dy.new_empty(weight.shape[1] if bias_grad else 0, dtype=dtype_of_sums(dy))


@torch.library.custom_op("tpkernels::dglu", mutates_args=())
def dglu(dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    return steps_on(dy.device).dglu(dy, weight, g, u, cast("Glu", kind))


@dglu.register_fake
def _(dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    dg = dy.new_empty(dy.shape[0], weight.shape[1])
    return dg, torch.empty_like(dg), torch.empty_like(dg)


@torch.library.custom_op("tpkernels::wgrad", mutates_args=())
def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return steps_on(dy.device).wgrad(dy, x)


@wgrad.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(dy.shape[1], x.shape[1])


@torch.library.custom_op("tpkernels::bias_grad", mutates_args=())
def bias_grad(dy: Tensor) -> Tensor:
    return steps_on(dy.device).bias_grad(dy)


@bias_grad.register_fake
def _(dy: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[1], dtype=dtype_of_sums(dy))


@torch.library.custom_op("tpkernels::norm", mutates_args=())
def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = steps_on(x.device).norm(x, weight, bias, cast("Norm", kind), eps)
    return y.contiguous(), or_empty(mean, rstd), rstd  # torch's y is laid out like x


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[0], dtype=dtype_of_sums(x))
    return x.new_empty(x.shape), rstd.new_empty(0) if kind == "rms_norm" else torch.empty_like(rstd), rstd


@torch.library.custom_op("tpkernels::norm_grad", mutates_args=())
def norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = steps_on(x.device).norm_grad(dy, x, weight, mean, rstd, cast("Norm", kind))
    return dx.contiguous(), dw, or_empty(db, dw)


@norm_grad.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    dw = weight.new_empty(x.shape[1], dtype=dtype_of_sums(x))
    return x.new_empty(x.shape), dw, dw.new_empty(0) if kind == "rms_norm" else torch.empty_like(dw)
