"""What torch computes in the place of each launcher: the same tensors in, the same tensors out.

It runs where there is no GPU, needs no Triton, and in float64 is the truth that kernels are compared with.
Records of primitives take their functions from here. A result that is not asked for is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.tp_invariance import tree_sum

CACHED = 2**17  # numbers that a CPU's cache holds, beside as many others
FLOOR = -1000.0  # exp(x) is 0 from here on, and as much of it as counts: 0 times minus infinity is NaN


def linear_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, keep_z: bool
) -> tuple[Tensor, Tensor | None]:
    """y = act(z), z = x weightᵀ + bias -> (y, z)."""
    z = functional.linear(x, weight, bias)
    y = z if activation == "none" else act_ref(z, activation)
    return y, z if keep_z else None


def reduce_slots_ref(
    slots: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, *, tree: bool = False
) -> Tensor:
    """y of `reduce_slots`: summed slot by slot, or in a tree, in fp32 or wider, rounded once."""
    wide = torch.promote_types(slots.dtype, torch.float32)
    total = tree_sum(slots.to(wide).unbind()) if tree else torch.zeros_like(slots[0], dtype=wide)
    for slot in () if tree else slots:
        total += slot
    return (total if bias is None else total + bias).to(dtype or slots.dtype)


def glu_ref(
    x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h = f(g) * u, g = x w_gateᵀ, u = x w_upᵀ -> (h, g, u)."""
    g, u = functional.linear(x, w_gate), functional.linear(x, w_up)
    h = act_ref(g, GATE_OF[kind]) * u
    return (h, g, u) if keep_gu else (h, None, None)


def dgrad_ref(dy: Tensor, weight: Tensor) -> Tensor:
    """dy weight: the gradient of x in x weightᵀ."""
    return dy @ weight


def dgrad_pairs_ref(dy: Tensor, weight: Tensor, dy2: Tensor, weight2: Tensor) -> Tensor:
    """dy weight + dy2 weight2; the first product is rounded before the second is added to it."""
    dx = dy @ weight
    return dx.addmm_(dy2.to(dx.dtype), weight2.to(dx.dtype))  # autocast casts the first product only


def dgrad_act_ref(
    dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """dz = (dy weight) * act'(z) and its sum over tokens in fp32 or wider -> (dz, db)."""
    dz = act_grad_ref(dy @ weight, z, activation)
    return dz, bias_grad_ref(dz) if bias_grad else None


def dglu_ref(dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of g and u in (f(g) * u) weightᵀ, and f(g) * u again -> (dg, du, h)."""
    return glu_grad_ref(dy @ weight, g, u, kind)


def glu_grad_ref(dh: Tensor, g: Tensor, u: Tensor, kind: Glu) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of g and u in f(g) * u, and f(g) * u again -> (dg, du, h)."""
    gate = act_ref(g, GATE_OF[kind])
    return act_grad_ref(dh * u, g, GATE_OF[kind]), dh * gate, gate * u


def wgrad_ref(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀ x: the gradient of weight in x weightᵀ."""
    return dy.T @ x


def wgrad_accumulate_ref_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dyᵀ x, in place; main_grad may be wider than dy and x."""
    if main_grad.dtype == dy.dtype:
        main_grad.addmm_(dy.T, x)  # the product is never written
    else:
        main_grad.add_(dy.T @ x)


def bias_grad_ref(dy: Tensor) -> Tensor:
    """The sum over tokens, in fp32 or wider."""
    dtype = dy.dtype
    # the usual case is not promoted: that takes a tenth of the time of a tiny sum
    return dy.sum(0, dtype=dtype if dtype is torch.float32 else torch.promote_types(dtype, torch.float32))


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """y = x * rstd * weight, computed in fp32 or wider and rounded once -> (y, rstd)."""
    s = _at_least_fp32(x)
    rstd = torch.rsqrt(s.square().mean(1) + eps)
    return (s * rstd[:, None] * weight).to(x.dtype), rstd


def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * weight + bias, as `rms_norm_ref` computes -> (y, mean, rstd).

    Its gradient below has derivatives of any order; torch's fused form, which the record takes, has not.
    """
    s = _at_least_fp32(x)
    mean = s.mean(1)
    centred = s - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(1) + eps)
    y = centred * rstd[:, None] * weight
    return (y if bias is None else y + bias).to(x.dtype), mean, rstd


def rms_norm_bwd_ref(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, and in fp32 or wider of weight -> (dx, dweight)."""
    n, wide_dy = _at_least_fp32(x) * rstd[:, None], _at_least_fp32(dy)
    dn = wide_dy * weight
    dx = rstd[:, None] * (dn - n * (dn * n).mean(1, keepdim=True))
    return dx.to(x.dtype), (wide_dy * n).sum(0)


def layer_norm_bwd_ref(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, and in fp32 or wider of weight and bias -> (dx, dweight, dbias)."""
    n, wide_dy = (_at_least_fp32(x) - mean[:, None]) * rstd[:, None], _at_least_fp32(dy)
    dn = wide_dy * weight
    dx = rstd[:, None] * (dn - n * (dn * n).mean(1, keepdim=True) - dn.mean(1, keepdim=True))
    return dx.to(x.dtype), (wide_dy * n).sum(0), bias_grad_ref(dy)


def embedding_ref(ids: Tensor, weight: Tensor, first_id: int = 0) -> Tensor:
    """Rows of this rank's shard of a table, zeros for ids of other ranks."""
    if first_id == 0 and ids.is_cpu and weight.shape[1]:
        with suppress(IndexError):  # torch looks at them anyway
            return torch.embedding(weight, ids)
    row = ids - first_id
    near = row.clamp(0, weight.shape[0] - 1)
    return _clear_rows_(torch.embedding(weight, near), near != row)


def embedding_bwd_ref(
    dy: Tensor, ids: Tensor, rows: int, first_id: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """The gradient of this rank's shard: summed in fp32 or wider in the order of tokens, rounded once."""
    dtype, dy = dtype or dy.dtype, _at_least_fp32(dy)
    row = ids - first_id if first_id else ids
    if surely_within(row, rows):
        return dy.new_zeros(rows, dy.shape[1]).index_add_(0, row, dy).to(dtype)
    row = row.masked_fill((row < 0) | (row >= rows), rows)  # one row more, which is left out
    if dy.is_cpu:
        summed = dy.new_zeros(rows + 1, dy.shape[1]).index_add_(0, row, dy)
    else:  # where index_add_ is atomic, in any order
        summed = torch.ops.aten.embedding_dense_backward.default(dy, row, rows + 1, rows, False)
    return summed[:rows].to(dtype)


def surely_within(ids: Tensor, size: int) -> bool:
    """Whether a look says that all are from 0 to size - 1."""
    if not ids.is_cpu:  # a look would hold up the host
        return False
    if not ids.numel():
        return True
    lowest, highest = ids.aminmax()
    return int(lowest) >= 0 and int(highest) < size


def softmax_statistics_ref(
    logits: Tensor,
    target: Tensor,
    columns: int | None = None,
    first_id: int = 0,
    scale: float | None = None,
) -> Tensor:
    """(4, tokens) in fp32 or wider: maximum, total, picked and summed of each row, of its first `columns`.

    scale: these are of scale * logits, with weighted instead of summed
    """
    x = logits[:, :columns]
    wide = torch.promote_types(x.dtype, torch.float32)
    nothing = torch.tensor([torch.finfo(wide).min, 0, 0, 0], dtype=wide, device=x.device)[:, None]
    if not x.shape[1]:
        return nothing.repeat(1, x.shape[0])
    column, ours = column_of(target, x.shape[1], first_id)
    picked = torch.where(ours, x.gather(1, column[:, None])[:, 0], 0).to(wide)
    if scale is not None:
        picked *= scale
    blocks = [x[rows] for rows in _blocks_of_rows(x)] or [x]
    scratch = torch.empty_like(blocks[0], dtype=wide)  # stays in the cache from block to block
    parts = [_sums_of_rows(block, scratch[: len(block)], scale) for block in blocks]
    maximum, total, summed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return torch.where(target >= 0, torch.stack([maximum, total, picked, summed]), nothing)


def _sums_of_rows(x: Tensor, scratch: Tensor, scale: float | None) -> Tensor:
    """(3, rows): maximum, total, and summed or weighted, in the dtype of scratch."""
    wide = scratch.dtype
    maximum = x.amax(1).to(wide)
    if scale is not None:
        maximum = maximum.mul_(scale).clamp_min_(torch.finfo(wide).min)
        excess = scratch.copy_(x).mul_(scale).sub_(maximum[:, None])
        exponentials = excess.exp()
        total = exponentials.sum(1)
        return torch.stack([maximum, total, exponentials.mul_(excess.clamp_min_(FLOOR)).sum(1)])
    maximum = maximum.clamp_min_(torch.finfo(wide).min)
    total = torch.sub(x, maximum[:, None], out=scratch).exp_().sum(1)
    return torch.stack([maximum, total, x.sum(1, dtype=wide)])


def _blocks_of_rows(x: Tensor) -> Iterator[slice]:
    """All at once, or on a CPU, which passes over them several times, as many as its cache holds."""
    size = max(1, CACHED // x.shape[1] if x.is_cpu else x.shape[0])
    for start in range(0, x.shape[0], size):
        yield slice(start, start + size)


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
    in_place: bool = False,
    scale: float | None = None,
    mean: Tensor | None = None,
    dentropy: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits, in their dtype; in their memory if `in_place`.

    scale, mean, dentropy: that of scale * logits, also from the gradient of their entropy
    """
    x = logits[:, :columns]
    dlogits = logits if in_place else logits.new_empty(logits.shape)
    dlogits[:, x.shape[1] :] = 0
    if not x.shape[1]:
        return dlogits
    column, ours = column_of(target, x.shape[1], first_id)
    ignored = target < 0
    shift = maximum.masked_fill(ignored, 0)  # it is the lowest number, and exp takes its time to overflow
    wide, factor = dlogits.dtype == shift.dtype, dloss / total
    picked = (-on_target * dloss * ours)[:, None]
    for rows in _blocks_of_rows(x):
        block = dlogits[rows, : x.shape[1]]
        if scale is None:
            excess = torch.sub(x[rows], shift[rows, None], out=block if wide else None)
            excess.exp_().mul_(factor[rows, None])
        else:
            assert mean is not None
            assert dentropy is not None
            excess = block.copy_(x[rows]) if wide else x[rows].to(shift.dtype)
            exponentials = excess.mul_(scale).sub_(shift[rows, None]).exp()
            excess.clamp_min_(FLOOR).sub_(mean[rows, None]).mul_((-dentropy / total)[rows, None])
            excess.add_(factor[rows, None]).mul_(exponentials)
        if off_target:
            excess.sub_(off_target * dloss[rows, None])
        excess.scatter_add_(1, column[rows, None], picked[rows])
        if not wide:
            block.copy_(excess)
    _clear_rows_(dlogits, ignored)
    return dlogits


def _clear_rows_(matrix: Tensor, rows: Tensor) -> Tensor:
    """The matrix, with these of its rows set to zero. rows: a mask"""
    if matrix.is_cpu:  # several times as quick as a mask that is spread over columns
        return matrix.index_fill_(0, rows.nonzero()[:, 0], 0)
    return matrix.masked_fill_(rows[:, None], 0)  # the host does not wait to hear which


def column_of(target: Tensor, columns: int, first_id: int) -> tuple[Tensor, Tensor]:
    """Where each target lies among so many columns, and whether it does; another if not."""
    column = target.long() - first_id
    near = column.clamp(0, columns - 1)
    return near, near == column


def _at_least_fp32(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.to(torch.float32)
