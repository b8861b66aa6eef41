"""Each step by torch alone. The contract is `steps.Steps`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.kernels.activations import Activation, Glu, act_grad_ref, act_ref
from tpkernels.kernels.reference import (
    bias_grad_ref,
    dglu_ref,
    glu_ref,
    layer_norm_bwd_ref,
    layer_norm_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)
from tpkernels.tuning.steps import Norm


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
    y, _, mean, rstd = layer_norm_ref(x, weight, bias, eps)
    return y, mean, rstd


def norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    if kind == "rms_norm":
        return *rms_norm_bwd_ref(dy, x, weight, rstd), None
    assert mean is not None
    return layer_norm_bwd_ref(dy, x, weight, mean, rstd)
