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


def embedding_ref(ids: Tensor, weight: Tensor, first_id: int = 0) -> Tensor:
    """rows of `embedding_fwd`."""
    row = ids - first_id
    ours = (row >= 0) & (row < weight.shape[0])
    return functional.embedding(torch.where(ours, row, 0), weight).masked_fill(~ours[:, None], 0)


def embedding_bwd_ref(
    dy: Tensor, ids: Tensor, rows: int, first_id: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """dweight of `embedding_bwd`: summed in fp32 or wider, rounded once.

    torch's own backward, which sums in the dtype it is given: 16-bit gradients of a frequent id would drown.
    """
    row = ids - first_id
    row = torch.where((row >= 0) & (row < rows), row, rows)  # one row more, which its padding_idx leaves out
    summed: Tensor = torch.ops.aten.embedding_dense_backward(_at_least_fp32(dy), row, rows + 1, rows, False)
    return summed[:rows].to(dtype or dy.dtype)


def softmax_statistics_ref(
    logits: Tensor, target: Tensor, columns: int | None = None, first_id: int = 0
) -> Tensor:
    """(4, tokens) of `softmax_statistics`, in fp32 or wider."""
    x = _at_least_fp32(logits[:, :columns])
    lowest = torch.finfo(x.dtype).min
    found = x.new_zeros(4, x.shape[0])
    if x.shape[1]:
        maximum = x.amax(1).clamp_min(lowest)
        column, ours = _column_of(target, x.shape[1], first_id)
        picked = x.gather(1, column[:, None])[:, 0].masked_fill(~ours, 0)
        found = torch.stack([maximum, (x - maximum[:, None]).exp_().sum(1), picked, x.sum(1)])
    nothing = torch.tensor([lowest, 0, 0, 0], dtype=x.dtype, device=x.device)[:, None]
    return torch.where((target >= 0) & (x.shape[1] > 0), found, nothing)


def cross_entropy_grad_ref(
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    dloss: Tensor,
    columns: int | None = None,
    first_id: int = 0,
    on_target: float = 1.0,
    off_target: float = 0.0,
) -> Tensor:
    """dlogits of `cross_entropy_grad`, in the dtype of logits."""
    x = _at_least_fp32(logits[:, :columns])
    dlogits = torch.zeros_like(logits)
    if x.shape[1]:
        column, ours = _column_of(target, x.shape[1], first_id)
        excess = (x - maximum[:, None]).exp_().div_(total[:, None]).sub_(off_target)
        excess.scatter_add_(1, column[:, None], -on_target * ours.to(x.dtype)[:, None])
        excess.mul_(dloss[:, None]).masked_fill_((target < 0)[:, None], 0)
        dlogits[:, :columns] = excess
    return dlogits


def _column_of(target: Tensor, columns: int, first_id: int) -> tuple[Tensor, Tensor]:
    """Where each target lies among so many columns, and whether it does; 0 if not."""
    column = target.long() - first_id
    ours = (target >= 0) & (column >= 0) & (column < columns)
    return torch.where(ours, column, 0), ours


def _at_least_fp32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
