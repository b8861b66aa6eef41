"""Cross-entropy over this rank's columns, forward and backward. Oracles: `reference`.

T tokens; the first `columns` of this rank's V columns stand for ids from first_id on, the rest is padding.
In one pass over the logits:

    maximum = max x                     (T,)    the lowest float where nothing is finite
    total   = Σ exp(x - maximum)        (T,)    kept up to date while the maximum grows
    picked  = x[target - first_id]      (T,)    0 where another rank holds it
    summed  = Σ x                       (T,)    for label smoothing

From these of all ranks follow the loss of each row, and the maximum and total over the full vocabulary, with
which a second pass computes

    p       = exp(x - maximum) / total
    dlogits = dloss * (p - off_target - on_target [v = target - first_id])    (T, V)

For entropies there is a second form of both, of x = scale * logits:

    weighted = Σ exp(x - maximum) (x - maximum)             (T,)    in the place of summed
    entropy  = log(total) - mean,  mean = weighted / total  (T,)    over the full vocabulary
    dx       = what dlogits is above, - dentropy * p * (x - maximum - mean)

The smoothed target is on_target + off_target for the right id and off_target for any other. A row whose
target is negative does not count and is not read; its gradient, like that of padding columns, is zero.
Padding may hold anything: what is loaded of it with the last columns is dropped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import (
    require_columns,
    require_ids,
    require_matrices,
    require_statistic,
    require_writable,
)
from tpkernels.kernels.reference import FLOOR
from tpkernels.kernels.target import target_of
from tpkernels.kernels.tiles import INTERPRETED_LOGITS, LOGITS, BlockTile

mend()

# finite, so that no difference of two maxima is a NaN
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LEAST_EXCESS = tl.constexpr(FLOOR)


@triton.jit
def _softmax_statistics_kernel(
    logits_ptr,  # (T, V)
    target_ptr,  # (T,) contiguous
    statistics_ptr,  # (4, T) contiguous, fp32
    T,
    V,
    columns,
    first_id,
    stride_xt,
    stride_xv,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program goes through one row; each lane keeps statistics of its own until the end."""
    t = tl.program_id(0).to(tl.int64)  # int64: T * V passes 2**31 at 16k tokens of 128k columns
    target = tl.load(target_ptr + t).to(tl.int64)
    counted = tl.where(target < 0, 0, columns)
    row_ptr = logits_ptr + t * stride_xt
    maximum = tl.full((BLOCK_COLS,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    summed = tl.zeros((BLOCK_COLS,), tl.float32)  # or weighted
    for start in tl.range(0, counted, BLOCK_COLS):
        v = start + tl.arange(0, BLOCK_COLS)
        there = v < counted
        # V is a multiple of 16 where rows are aligned, `columns` is any number: a load that ended there would
        # take 2 bytes at a time instead of 16
        x = tl.load(row_ptr + v.to(tl.int64) * stride_xv, v < V, float("-inf")).to(tl.float32)
        x = tl.where(there, x, float("-inf"))
        if ENTROPY:
            x *= scale
        higher = x - maximum
        ratio = tl.exp(-tl.abs(higher))  # of the lower to the higher of the two: one exponential serves both
        if ENTROPY:
            # where it is bounded ratio is 0, which times an infinite number would be NaN
            bounded = tl.minimum(tl.maximum(higher, LEAST_EXCESS), -LEAST_EXCESS)
            summed = tl.where(higher > 0, (summed - total * bounded) * ratio, summed + ratio * bounded)
        total = tl.where(higher > 0, total * ratio + 1.0, total + ratio)
        maximum = tl.maximum(maximum, x)
        if not ENTROPY:
            summed += tl.where(there, x, 0.0)
    row_maximum = tl.max(maximum, axis=0)
    if ENTROPY:
        shift = tl.maximum(maximum - row_maximum, LEAST_EXCESS)
        summed = (summed + total * shift) * tl.exp(shift)
    row_total = tl.sum(total * tl.exp(maximum - row_maximum), axis=0)
    column = target - first_id
    picked = tl.load(row_ptr + column * stride_xv, (column >= 0) & (column < counted), 0.0).to(tl.float32)
    if ENTROPY:
        picked *= scale
    tl.store(statistics_ptr + t, row_maximum)
    tl.store(statistics_ptr + t + T, row_total)
    tl.store(statistics_ptr + t + 2 * T, picked)
    tl.store(statistics_ptr + t + 3 * T, tl.sum(summed, axis=0))


@planned
def softmax_statistics(
    logits: Tensor,
    target: Tensor,
    *,
    columns: int | None = None,
    first_id: int = 0,
    scale: float | None = None,
    tile: BlockTile | None = None,
) -> Tensor:
    """maximum, total, picked and summed of each row, in fp32; with a scale weighted instead of summed.

    logits: (tokens, this rank's columns)
    target: (tokens,) ids of the full vocabulary; negative: the row does not count
    columns: how many are no padding, by default all
    first_id: the id of the first column
    scale: of logits, above 0
    returns: (4, tokens)
    """
    require_matrices("softmax_statistics", ("logits", logits))
    require_ids("softmax_statistics", "target", target, logits, logits.shape[0])
    columns = require_columns("softmax_statistics", columns, logits)
    backend = target_of(logits.device).backend
    tile = tile or (INTERPRETED_LOGITS if backend == "interpreter" else LOGITS)
    T, V = logits.shape
    statistics = launch.empty((4, T), torch.float32, logits.device)
    if T:
        launch.on(logits.device, _softmax_statistics_kernel, (T,))(
            logits,
            target,
            statistics,
            T,
            V,
            columns,
            first_id,
            *logits.stride(),
            1.0 if scale is None else scale,
            ENTROPY=scale is not None,
            BLOCK_COLS=tile.block_cols,
            num_warps=tile.num_warps,
        )
    return statistics


@triton.jit
def _cross_entropy_grad_kernel(
    logits_ptr,  # (T, V)
    target_ptr,  # (T,) contiguous, like the next three
    maximum_ptr,  # (T,) fp32
    total_ptr,  # (T,) fp32
    dloss_ptr,  # (T,) fp32
    dlogits_ptr,  # (T, V), which may be the logits themselves
    V,
    columns,
    first_id,
    on_target,
    off_target,
    stride_xt,
    stride_xv,
    stride_dt,
    stride_dv,
    mean_ptr,  # (T,) fp32, unread unless ENTROPY, like the next two
    dentropy_ptr,  # (T,) fp32
    scale,
    ENTROPY: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program takes BLOCK_COLS logits of one row."""
    t = tl.program_id(0).to(tl.int64)  # int64: T * V passes 2**31 at 16k tokens of 128k columns
    start = tl.program_id(1) * BLOCK_COLS
    v = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    target = tl.load(target_ptr + t).to(tl.int64)
    counted = (v < columns) & (target >= 0)
    read = (v < V) & (target >= 0) & (start < columns)  # as a whole, see above
    x = tl.load(logits_ptr + t * stride_xt + v * stride_xv, read, 0.0).to(tl.float32)
    if ENTROPY:
        x *= scale
    excess = x - tl.load(maximum_ptr + t)
    p = tl.exp(excess) * (1.0 / tl.load(total_ptr + t))
    expected = off_target + tl.where(v == target - first_id, on_target, 0.0)
    dlogits = (p - expected) * tl.load(dloss_ptr + t)
    if ENTROPY:
        surplus = tl.maximum(excess, LEAST_EXCESS) - tl.load(mean_ptr + t)
        dlogits -= tl.load(dentropy_ptr + t) * p * surplus
    dlogits = tl.where(counted, dlogits, 0.0)
    tl.store(dlogits_ptr + t * stride_dt + v * stride_dv, dlogits.to(dlogits_ptr.dtype.element_ty), v < V)


@planned
def cross_entropy_grad(
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    dloss: Tensor,
    *,
    columns: int | None = None,
    first_id: int = 0,
    on_target: float = 1.0,
    off_target: float = 0.0,
    in_place: bool = False,
    scale: float | None = None,
    mean: Tensor | None = None,
    dentropy: Tensor | None = None,
    tile: BlockTile | None = None,
) -> Tensor:
    """The gradient of the logits, or of scale * logits, in the dtype of the logits.

    logits: (tokens, this rank's columns)
    target: (tokens,) ids of the full vocabulary; negative: the row does not count
    maximum, total: (tokens,) over the full vocabulary
    dloss: (tokens,) in fp32
    columns, first_id: as in `softmax_statistics`
    in_place: it is written into the memory of the logits
    scale, mean, dentropy: all or none; of the second form
    """
    launcher = "cross_entropy_grad"
    require_matrices(launcher, ("logits", logits))
    require_ids(launcher, "target", target, logits, logits.shape[0])
    columns = require_columns(launcher, columns, logits)
    statistics = {"maximum": maximum, "total": total, "dloss": dloss}
    if scale is not None:
        assert mean is not None
        assert dentropy is not None
        statistics |= {"mean": mean, "dentropy": dentropy}
    for name, vector in statistics.items():
        require_statistic(launcher, name, vector, logits)
    if in_place:
        require_writable(launcher, "logits", logits, logits.device)
    backend = target_of(logits.device).backend
    tile = tile or (INTERPRETED_LOGITS if backend == "interpreter" else LOGITS)
    T, V = logits.shape
    dlogits = logits if in_place else launch.empty((T, V), logits.dtype, logits.device)
    if dlogits.numel():
        launch.on(logits.device, _cross_entropy_grad_kernel, (T, launch.ceil_div(V, tile.block_cols)))(
            logits,
            target,
            maximum,
            total,
            dloss,
            dlogits,
            V,
            columns,
            first_id,
            on_target,
            off_target,
            *logits.stride(),
            *dlogits.stride(),
            dloss if mean is None else mean,
            dloss if dentropy is None else dentropy,
            1.0 if scale is None else scale,
            ENTROPY=scale is not None,
            BLOCK_COLS=tile.block_cols,
            num_warps=tile.num_warps,
        )
    return dlogits
