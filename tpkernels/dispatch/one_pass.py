"""Products by torch with one pass of ours behind: what a fused kernel has to beat, beside torch's own chains.

    linear       z = x wᵀ + b        y = f(z)
    glu          g, u = x wgᵀ, x wuᵀ    h = f(g) * u; one product where the weights are halves of one
    dgrad_act    dy w                dz = dy w * f'(z), and the bias gradient
    dglu         dh = dy w           dg, du, h

The product is rounded; the pass reads it, computes in fp32, and rounds once more. A result's memory holds the
product meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpkernels.dispatch.record import Library, launcher
from tpkernels.kernels.activations import GATE_OF, Activation, Glu
from tpkernels.kernels.operands import DTYPES, stacked

if TYPE_CHECKING:
    from tpkernels.dispatch.candidates import TuneKey
    from tpkernels.kernels.target import Target

_activate = launcher("elementwise", "activate")
_act_grad = launcher("elementwise", "act_grad")
_glu_grad = launcher("elementwise", "glu_grad")


def fits(key: TuneKey, target: Target) -> bool:
    """Whether the kernel is there, and has something to compute."""
    return key.dtype in DTYPES and "none" not in key.options and find_spec("triton") is not None


def _linear_fits(key: TuneKey, target: Target) -> bool:
    """With z alone: without it torch applies activations in place, or in cuBLASLt's epilogue."""
    return "z" in key.options and fits(key, target)


def product_into(z: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """z = x weightᵀ + bias, by torch."""
    if bias is None:
        torch.mm(x, weight.t(), out=z)
    else:
        torch.addmm(bias, x, weight.t(), out=z)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, keep_z: bool
) -> tuple[Tensor, Tensor]:
    y, z = (x.new_empty(len(x), len(weight)) for _ in range(2))
    _linear_into((y, z), x, weight, bias, activation, keep_z)
    return y, z


def _linear_into(
    out: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    keep_z: bool,
) -> None:
    y, z = out
    product_into(z, x, weight, bias)
    _activate(z, activation=activation, out=y)


def _glu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    results = [x.new_empty(len(x), len(w_up)) for _ in range(3 if keep_gu else 1)]
    _glu_into(results, x, w_gate, w_up, kind, keep_gu)
    h, g, u = results if keep_gu else (results[0], None, None)
    return h, g, u


def _glu_into(
    out: Sequence[Tensor], x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> None:
    """out: h, and g and u if they are kept; else g is computed where h is, and u beside"""
    h, g, u = out if keep_gu else (out[0], out[0], torch.empty_like(out[0]))
    torch.mm(x, w_gate.t(), out=g)
    torch.mm(x, w_up.t(), out=u)
    _activate(g, u, activation=GATE_OF[kind], out=h)


def _wide_fits(key: TuneKey, target: Target) -> bool:
    return "halves" in key.options and fits(key, target)


def _wide(
    x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """g and u are columns of one matrix."""
    h = x.new_empty(len(x), len(w_up))
    g, u = _wide_into((h,), x, w_gate, w_up, kind, False)
    return (h, g, u) if keep_gu else (h, None, None)


def _wide_into(
    out: Sequence[Tensor], x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> Sequence[Tensor]:
    """Without a copy no product writes g and u apart: if these are kept, there are two."""
    if keep_gu:
        _glu_into(out, x, w_gate, w_up, kind, True)
        return out[1:]
    both = x.new_empty(len(x), 2 * len(w_up))
    torch.mm(x, stacked(w_gate, w_up).t(), out=both)
    g, u = both.chunk(2, dim=1)
    _activate(g, u, activation=GATE_OF[kind], out=out[0])
    return g, u


def _dgrad_act(
    dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    dz, db = dy.new_empty(z.shape), dy.new_empty(z.shape[1], dtype=torch.float32) if bias_grad else None
    _dgrad_act_into((dz,) if db is None else (dz, db), dy, weight, z, activation, bias_grad)
    return dz, db


def _dgrad_act_into(
    out: Sequence[Tensor], dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
) -> None:
    """out: dz, where dy weight is computed, and db if it is asked for"""
    dz = torch.mm(dy, weight, out=out[0])
    _act_grad(dz, z, activation, bias_grad=bias_grad, out=tuple(out))


def _dglu(dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu) -> tuple[Tensor, ...]:
    results = tuple(dy.new_empty(g.shape) for _ in range(3))
    _dglu_into(results, dy, weight, g, u, kind)
    return results


def _dglu_into(out: Sequence[Tensor], dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu) -> None:
    """out: dg, du, where dy weight is computed, and h"""
    dh = torch.mm(dy, weight, out=out[1])
    _glu_grad(dh, g, u, kind=kind, out=tuple(out))


LINEAR = Library("mm+activate", _linear, _linear_fits, into=_linear_into)
GLU = Library("mm+activate", _glu, fits, into=_glu_into)
WIDE_GLU = Library("wide_mm+activate", _wide, _wide_fits, into=_wide_into)
DGRAD_ACT = Library("mm+act_grad", _dgrad_act, fits, into=_dgrad_act_into)
DGLU = Library("mm+glu_grad", _dglu, fits, into=_dglu_into)
