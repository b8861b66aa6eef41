"""Cross-entropy over a part of the vocabulary: what a rank knows of each row, in one pass over the logits.

T tokens; of this rank's columns the first `columns` stand for ids from first_id on, the rest is padding:

    maximum = max x                     (T,)    the lowest float where nothing is finite
    total   = Σ exp(x - maximum)        (T,)    kept up to date while the maximum grows
    picked  = x[target - first_id]      (T,)    0 where another rank has it
    summed  = Σ x                       (T,)    for label smoothing

From these of all ranks follow the loss of each row, and what `cross_entropy_backward` needs. A row whose
target is negative counts for nothing and is not read. The oracle is `reference.softmax_statistics_ref`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.operands import require_columns, require_ids, require_matrices
from tpkernels.kernels.target import launching_on, target_of
from tpkernels.kernels.tiles import INTERPRETED_LOGITS, LOGITS, LogitsTile

mend()

# finite, so that no difference of two maxima is a NaN
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _softmax_statistics_kernel(
    logits_ptr,  # (T, V)
    target_ptr,  # (T,) contiguous
    statistics_ptr,  # (4, T) contiguous, fp32
    T,
    columns,
    first_id,
    stride_xt,
    stride_xv,
    BLOCK_COLS: tl.constexpr,
):
    """One program goes through one row; each lane keeps statistics of its own until the end."""
    t = tl.program_id(0).to(tl.int64)  # int64: T * V passes 2**31 at 16k tokens of 128k columns
    target = tl.load(target_ptr + t).to(tl.int64)
    counted = tl.where(target < 0, 0, columns)
    row_ptr = logits_ptr + t * stride_xt
    maximum = tl.full((BLOCK_COLS,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    summed = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in tl.range(0, counted, BLOCK_COLS):
        v = start + tl.arange(0, BLOCK_COLS)
        there = v < counted
        x = tl.load(row_ptr + v.to(tl.int64) * stride_xv, there, float("-inf")).to(tl.float32)
        higher = x - maximum
        ratio = tl.exp(-tl.abs(higher))  # of the lower to the higher of the two: one exponential serves both
        total = tl.where(higher > 0, total * ratio + 1.0, total + ratio)
        maximum = tl.maximum(maximum, x)
        summed += tl.where(there, x, 0.0)
    row_maximum = tl.max(maximum, axis=0)
    row_total = tl.sum(total * tl.exp(maximum - row_maximum), axis=0)
    column = target - first_id
    picked = tl.load(row_ptr + column * stride_xv, (column >= 0) & (column < counted), 0.0).to(tl.float32)
    tl.store(statistics_ptr + t, row_maximum)
    tl.store(statistics_ptr + t + T, row_total)
    tl.store(statistics_ptr + t + 2 * T, picked)
    tl.store(statistics_ptr + t + 3 * T, tl.sum(summed, axis=0))


def softmax_statistics(
    logits: Tensor,
    target: Tensor,
    *,
    columns: int | None = None,
    first_id: int = 0,
    tile: LogitsTile | None = None,
) -> Tensor:
    """maximum, total, picked and summed of each row, in fp32.

    logits: (tokens, this rank's columns)
    target: (tokens,) ids of the whole vocabulary; negative: the row does not count
    columns: how many are no padding, by default all
    first_id: the id of the first column
    returns: (4, tokens)
    """
    require_matrices("softmax_statistics", ("logits", logits))
    require_ids("softmax_statistics", "target", target, logits, logits.shape[0])
    columns = require_columns("softmax_statistics", columns, logits)
    backend = target_of(logits.device).backend
    tile = tile or (INTERPRETED_LOGITS if backend == "interpreter" else LOGITS)
    T = logits.shape[0]
    statistics = launch.empty((4, T), torch.float32, logits.device)
    if T:
        with launching_on(logits.device):
            _softmax_statistics_kernel[(T,)](
                logits,
                target,
                statistics,
                T,
                columns,
                first_id,
                *logits.stride(),
                BLOCK_COLS=tile.block_cols,
                num_warps=tile.num_warps,
            )
    return statistics
