"""Each step by our kernels. The contract is `steps.Steps`.

Tile and form are those that the launchers choose, unless the chooser, which timed others, names them.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.dispatch.steps import Norm
from tpkernels.kernels import bias_grad as _bias_grad
from tpkernels.kernels import dglu as _dglu
from tpkernels.kernels import dgrad as _dgrad
from tpkernels.kernels import glu as _glu
from tpkernels.kernels import linear as _linear
from tpkernels.kernels import norm as _norm
from tpkernels.kernels import wgrad as _wgrad
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.operands import Form
from tpkernels.kernels.tiles import MatmulTile


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    keep_z: bool,
    *,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> tuple[Tensor, Tensor | None]:
    return _linear.linear_fwd(x, weight, bias, activation=activation, keep_z=keep_z, tile=tile, form=form)


def linear_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    y.copy_(linear(x, weight, bias, "none", keep_z=False)[0])


def glu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    kind: Glu,
    keep_gu: bool,
    *,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _glu.glu_fwd(x, w_gate, w_up, kind=kind, keep_gu=keep_gu, tile=tile, form=form)


def dgrad(dy: Tensor, weight: Tensor, *, tile: MatmulTile | None = None, form: Form | None = None) -> Tensor:
    return _dgrad.dgrad(dy, weight, tile=tile, form=form)


def dgrad_act(
    dy: Tensor,
    weight: Tensor,
    z: Tensor,
    activation: Activation,
    bias_grad: bool,
    *,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> tuple[Tensor, Tensor | None]:
    return _dgrad.dgrad_act(dy, weight, z, activation, bias_grad=bias_grad, tile=tile, form=form)


def dglu(
    dy: Tensor,
    weight: Tensor,
    g: Tensor,
    u: Tensor,
    kind: Glu,
    *,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dg, du, h = _dglu.dglu(dy, weight, g, u, kind=kind, emit_h=True, tile=tile, form=form)
    assert h is not None
    return dg, du, h


def wgrad(dy: Tensor, x: Tensor, *, tile: MatmulTile | None = None, form: Form | None = None) -> Tensor:
    return _wgrad.wgrad(dy, x, tile=tile, form=form)


def wgrad_accumulate_(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> None:
    _wgrad.wgrad_accumulate_(main_grad, dy, x, tile=tile, form=form)


def bias_grad(dy: Tensor) -> Tensor:
    return _bias_grad.bias_grad(dy)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    if kind == "rms_norm":
        y, _, mean, rstd = _norm.rms_norm_fwd(x, weight, eps=eps)
    else:
        y, _, mean, rstd = _norm.layer_norm_fwd(x, weight, bias, eps=eps)
    return y, mean, rstd


def norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    if kind == "rms_norm":
        return _norm.rms_norm_bwd(dy, x, weight, rstd)
    assert mean is not None
    return _norm.layer_norm_bwd(dy, x, weight, mean, rstd)
