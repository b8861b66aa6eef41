"""Each step by torch alone. The contract is `steps.Steps`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.dispatch.steps import Norm
from tpkernels.kernels.activations import Activation, Glu, act_grad_ref, act_ref
from tpkernels.kernels.reference import (
    bias_grad_ref,
    dglu_ref,
    glu_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, keep_z: bool
) -> tuple[Tensor, Tensor | None]:
    z = functional.linear(x, weight, bias)
    return act_ref(z, activation), z if keep_z else None


def linear_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def glu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    h, g, u = glu_ref(x, w_gate, w_up, kind)
    return (h, g, u) if keep_gu else (h, None, None)


def dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight


def dgrad_act(
    dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    dz = act_grad_ref(dy @ weight, z, activation)
    return dz, bias_grad_ref(dz) if bias_grad else None


def dglu(dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu) -> tuple[Tensor, Tensor, Tensor]:
    return dglu_ref(dy, weight, g, u, kind)


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return dy.T @ x


def wgrad_accumulate_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    if main_grad.dtype == dy.dtype:
        main_grad.addmm_(dy.T, x)  # the product is never written
    else:
        main_grad.add_(dy.T @ x)


def bias_grad(dy: Tensor) -> Tensor:
    return bias_grad_ref(dy)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    if kind == "rms_norm":
        y, _, rstd = rms_norm_ref(x, weight, eps)
        return y, None, rstd
    # torch's fused kernel in fp32 or wider: given narrower x, it would keep mean and rstd narrow too
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    y, mean, rstd = torch.native_layer_norm(x.to(wide), weight.shape, weight.to(wide), bias, eps)
    return y.to(x.dtype), mean.view(-1), rstd.view(-1)


def norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    if kind == "rms_norm":
        return *rms_norm_bwd_ref(dy, x, weight, rstd), None
    assert mean is not None
    wide = torch.promote_types(x.dtype, torch.float32)
    wide_dy, wide_x = dy.to(wide), x.to(wide)
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(
        wide_dy, wide_x, weight.shape, mean, rstd, weight.to(wide), None, (True, False, False)
    )[0]
    # its sums over tokens are taken one by one, and off by ten times as much at 8192 of them
    dw = (wide_x - mean[:, None]).mul_(rstd[:, None]).mul_(wide_dy).sum(0)
    return dx.to(x.dtype), dw, bias_grad_ref(dy)
