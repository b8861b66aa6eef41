"""Each step by our kernels, with the tile that their launchers choose. The contract is `steps.Steps`."""

from __future__ import annotations

from torch import Tensor

from tpkernels.kernels import bias_grad as _bias_grad
from tpkernels.kernels import dglu as _dglu
from tpkernels.kernels import dgrad as _dgrad
from tpkernels.kernels import glu as _glu
from tpkernels.kernels import linear as _linear
from tpkernels.kernels import wgrad as _wgrad
from tpkernels.kernels.activations import Activation, Glu


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, keep_z: bool
) -> tuple[Tensor, Tensor | None]:
    return _linear.linear_fwd(x, weight, bias, activation=activation, keep_z=keep_z)


def glu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _glu.glu_fwd(x, w_gate, w_up, kind=kind, keep_gu=keep_gu)


def dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    return _dgrad.dgrad(dy, weight)


def dgrad_act(
    dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    return _dgrad.dgrad_act(dy, weight, z, activation, bias_grad=bias_grad)


def dglu(dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu) -> tuple[Tensor, Tensor, Tensor]:
    dg, du, h = _dglu.dglu(dy, weight, g, u, kind=kind, emit_h=True)
    assert h is not None
    return dg, du, h


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return _wgrad.wgrad(dy, x)


def bias_grad(dy: Tensor) -> Tensor:
    return _bias_grad.bias_grad(dy)
