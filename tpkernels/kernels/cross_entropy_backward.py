"""Gradient of cross-entropy over a part of the vocabulary, in one pass. The oracle is in `reference`.

T tokens; columns as in `cross_entropy`, maximum and total of all ranks together:

    p       = exp(x - maximum) / total
    dlogits = dloss * (p - off_target - on_target [v = target - first_id])    (T, V)

on_target + off_target is what the smoothed target says of the right id, off_target of any other. Padding
columns and rows with a negative target get zeros, whatever lies there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.operands import (
    require_columns,
    require_ids,
    require_matrices,
    require_statistic,
    require_writable,
)
from tpkernels.kernels.target import launching_on, target_of
from tpkernels.kernels.tiles import INTERPRETED_LOGITS, LOGITS, LogitsTile

mend()


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
    BLOCK_COLS: tl.constexpr,
):
    """One program takes BLOCK_COLS logits of one row."""
    t = tl.program_id(0).to(tl.int64)  # int64: T * V passes 2**31 at 16k tokens of 128k columns
    v = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    target = tl.load(target_ptr + t).to(tl.int64)
    counted = (v < columns) & (target >= 0)
    x = tl.load(logits_ptr + t * stride_xt + v * stride_xv, counted, 0.0).to(tl.float32)
    p = tl.exp(x - tl.load(maximum_ptr + t)) * (1.0 / tl.load(total_ptr + t))
    expected = off_target + tl.where(v == target - first_id, on_target, 0.0)
    dlogits = tl.where(counted, (p - expected) * tl.load(dloss_ptr + t), 0.0)
    tl.store(dlogits_ptr + t * stride_dt + v * stride_dv, dlogits.to(dlogits_ptr.dtype.element_ty), v < V)


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
    into: Tensor | None = None,
    tile: LogitsTile | None = None,
) -> Tensor:
    """The gradient of the logits, in their dtype.

    logits: (tokens, this rank's columns)
    target: (tokens,) ids of the whole vocabulary; negative: the row does not count
    maximum, total: (tokens,) of all ranks together
    dloss: (tokens,) in fp32
    columns, first_id: as in `softmax_statistics`
    into: where it is written, which may be `logits`; by default new
    """
    launcher = "cross_entropy_grad"
    require_matrices(launcher, ("logits", logits))
    require_ids(launcher, "target", target, logits, logits.shape[0])
    columns = require_columns(launcher, columns, logits)
    for name, vector in (("maximum", maximum), ("total", total), ("dloss", dloss)):
        require_statistic(launcher, name, vector, logits)
    if into is not None:
        require_writable(launcher, "into", into, logits.device)
        if into.shape != logits.shape or into.dtype != logits.dtype:
            raise ValueError(
                f"{launcher}: expected into {tuple(logits.shape)} in {logits.dtype} like the logits, got "
                f"{tuple(into.shape)} in {into.dtype}"
            )
    backend = target_of(logits.device).backend
    tile = tile or (INTERPRETED_LOGITS if backend == "interpreter" else LOGITS)
    T, V = logits.shape
    dlogits = launch.empty((T, V), logits.dtype, logits.device) if into is None else into
    if dlogits.numel():
        with launching_on(logits.device):
            _cross_entropy_grad_kernel[(T, launch.ceil_div(V, tile.block_cols))](
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
                BLOCK_COLS=tile.block_cols,
                num_warps=tile.num_warps,
            )
    return dlogits
