"""A torch oracle for each launcher: the same tensors in, the same tensors out, plain torch in between.

They are what a launcher must equal in the dtype it is given (in float64: the truth that tests compare with),
and what runs where there is no GPU. They need no Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref

CACHED = 2**18  # numbers that a CPU's cache holds


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
    dtype = dy.dtype
    # the usual case is not promoted: that takes a tenth of the time of a tiny sum
    return dy.sum(0, dtype=dtype if dtype is torch.float32 else torch.promote_types(dtype, torch.float32))


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
    if surely_within(row, weight.shape[0]):
        return functional.embedding(row, weight)
    near = row.clamp(0, weight.shape[0] - 1)
    return _clear_rows_(functional.embedding(near, weight), near != row)


def embedding_bwd_ref(
    dy: Tensor, ids: Tensor, rows: int, first_id: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """dweight of `embedding_bwd`: summed in fp32 or wider, rounded once.

    torch's own backward, which sums in the dtype it is given: 16-bit gradients of a frequent id would drown.
    """
    row = ids - first_id
    if not surely_within(row, rows):
        row.masked_fill_((row < 0) | (row >= rows), rows)  # one row more, which its padding_idx leaves out
    summed: Tensor = torch.ops.aten.embedding_dense_backward(_at_least_fp32(dy), row, rows + 1, rows, False)
    return summed[:rows].to(dtype or dy.dtype)


def surely_within(ids: Tensor, size: int) -> bool:
    """Whether a look says that all are from 0 to size - 1."""
    if not ids.is_cpu:  # a look would hold up the host
        return False
    if not ids.numel():
        return True
    lowest, highest = ids.aminmax()
    return int(lowest) >= 0 and int(highest) < size


def softmax_statistics_ref(
    logits: Tensor, target: Tensor, columns: int | None = None, first_id: int = 0
) -> Tensor:
    """(4, tokens) of `softmax_statistics`, in fp32 or wider."""
    x = logits[:, :columns]
    wide = torch.promote_types(x.dtype, torch.float32)
    nothing = torch.tensor([torch.finfo(wide).min, 0, 0, 0], dtype=wide, device=x.device)[:, None]
    if not x.shape[1]:
        return nothing.repeat(1, x.shape[0])
    column, ours = _column_of(target, x.shape[1], first_id)
    picked = torch.where(ours, x.gather(1, column[:, None])[:, 0], 0).to(wide)
    # a CPU reads rows three times, from its cache if they are few
    rows = max(1, CACHED // x.shape[1] if x.is_cpu else x.shape[0])
    parts = [_sums_of_rows(part, wide) for part in x.split(rows)]
    maximum, total, summed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return torch.where(target >= 0, torch.stack([maximum, total, picked, summed]), nothing)


def _sums_of_rows(x: Tensor, wide: torch.dtype) -> Tensor:
    """(3, rows): the maximum, the sum of exponentials beside it, and the sum."""
    maximum = x.amax(1).to(wide).clamp_min(torch.finfo(wide).min)
    return torch.stack([maximum, (x - maximum[:, None]).exp_().sum(1), x.sum(1, dtype=wide)])


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
    into: Tensor | None = None,
) -> Tensor:
    """dlogits of `cross_entropy_grad`, in the dtype of logits; written `into` that, which may be logits."""
    x = logits[:, :columns]
    dlogits = logits.new_empty(logits.shape) if into is None else into
    dlogits[:, x.shape[1] :] = 0
    if not x.shape[1]:
        return dlogits
    column, ours = _column_of(target, x.shape[1], first_id)
    ignored = target < 0
    shift = maximum.masked_fill(ignored, 0)  # it is the lowest number, and exp takes its time to overflow
    in_place = dlogits.dtype == shift.dtype
    excess = torch.sub(x, shift[:, None], out=dlogits[:, :columns] if in_place else None)
    excess.exp_().mul_((dloss / total)[:, None])
    if off_target:
        excess.sub_(off_target * dloss[:, None])
    excess.scatter_add_(1, column[:, None], (-on_target * dloss * ours)[:, None])
    _clear_rows_(excess, ignored)
    if not in_place:
        dlogits[:, :columns] = excess
    return dlogits


def _clear_rows_(matrix: Tensor, rows: Tensor) -> Tensor:
    """The matrix, with these of its rows set to zero. rows: a mask"""
    if matrix.is_cpu:  # several times as quick as a mask that is spread over columns
        return matrix.index_fill_(0, rows.nonzero()[:, 0], 0)
    return matrix.masked_fill_(rows[:, None], 0)  # the host does not wait to hear which


def _column_of(target: Tensor, columns: int, first_id: int) -> tuple[Tensor, Tensor]:
    """Where each target lies among so many columns, and whether it does; another if not."""
    column = target.long() - first_id
    near = column.clamp(0, columns - 1)
    return near, near == column


def _at_least_fp32(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.to(torch.float32)
