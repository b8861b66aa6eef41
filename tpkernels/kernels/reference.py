"""A torch oracle for each launcher: the same tensors in, the same tensors out, plain torch in between.

They are what a launcher must equal in the dtype it is given (in float64: the truth that tests compare with),
and what runs where there is no GPU. They need no Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref


def linear_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> tuple[Tensor, Tensor]:
    """(y, z) of `linear_fwd`."""
    z = functional.linear(x, weight, bias)
    return act_ref(z, activation), z


def gather_linear_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> tuple[Tensor, Tensor]:
    """(y, z) of `gather_linear_fwd`, once all of x is here."""
    return linear_ref(x, weight, bias, activation)


def reduce_slots_ref(slots: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """y of `reduce_slots`: summed slot by slot in fp32 or wider, rounded once."""
    total = torch.zeros_like(slots[0], dtype=torch.promote_types(slots.dtype, torch.float32))
    for slot in slots:
        total += slot
    return (total if bias is None else total + bias).to(dtype or slots.dtype)


def glu_ref(x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu = "swiglu") -> tuple[Tensor, Tensor, Tensor]:
    """(h, g, u) of `glu_fwd`."""
    g, u = functional.linear(x, w_gate), functional.linear(x, w_up)
    return act_ref(g, GATE_OF[kind]) * u, g, u


def dgrad_ref(dy: Tensor, weight: Tensor) -> Tensor:
    """dx of `dgrad`."""
    return dy @ weight


def dgrad_act_ref(dy: Tensor, weight: Tensor, z: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """(dz, db) of `dgrad_act`; the bias gradient is summed in the dtype given, at least fp32."""
    dz = act_grad_ref(dy @ weight, z, activation)
    return dz, bias_grad_ref(dz)


def dglu_ref(
    dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu = "swiglu"
) -> tuple[Tensor, Tensor, Tensor]:
    """(dg, du, h) of `dglu`."""
    dh, gate = dy @ weight, act_ref(g, GATE_OF[kind])
    return act_grad_ref(dh * u, g, GATE_OF[kind]), dh * gate, gate * u


def wgrad_ref(dy: Tensor, x: Tensor) -> Tensor:
    """dw of `wgrad`."""
    return dy.T @ x


def wgrad_accumulate_ref_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """What `wgrad_accumulate_` does to main_grad."""
    wider = torch.promote_types(main_grad.dtype, torch.float32)
    main_grad += dy.T.to(wider) @ x.to(wider)


def bias_grad_ref(dy: Tensor) -> Tensor:
    """db of `bias_grad`: the sum over tokens, in fp32 or wider."""
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float = 1e-5, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, summed, rstd) of `rms_norm_fwd`: computed in fp32 or wider, rounded once."""
    summed = x if residual is None else x + residual
    s = _at_least_fp32(summed)
    rstd = torch.rsqrt(s.square().mean(1) + eps)
    return (s * rstd[:, None] * weight).to(x.dtype), summed, rstd


def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, summed, mean, rstd) of `layer_norm_fwd`: computed in fp32 or wider, rounded once."""
    summed = x if residual is None else x + residual
    s = _at_least_fp32(summed)
    mean = s.mean(1)
    centred = s - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(1) + eps)
    y = centred * rstd[:, None] * weight
    return (y if bias is None else y + bias).to(x.dtype), summed, mean, rstd


def rms_norm_bwd_ref(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dsummed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of `rms_norm_bwd`."""
    n, wide_dy = _at_least_fp32(x) * rstd[:, None], _at_least_fp32(dy)
    dn = wide_dy * weight
    ds = rstd[:, None] * (dn - n * (dn * n).mean(1, keepdim=True))
    return (ds if dsummed is None else ds + dsummed).to(x.dtype), (wide_dy * n).sum(0)


def layer_norm_bwd_ref(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dsummed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of `layer_norm_bwd`."""
    n, wide_dy = (_at_least_fp32(x) - mean[:, None]) * rstd[:, None], _at_least_fp32(dy)
    dn = wide_dy * weight
    ds = rstd[:, None] * (dn - n * (dn * n).mean(1, keepdim=True) - dn.mean(1, keepdim=True))
    dx = (ds if dsummed is None else ds + dsummed).to(x.dtype)
    return dx, (wide_dy * n).sum(0), bias_grad_ref(dy)


def _at_least_fp32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
