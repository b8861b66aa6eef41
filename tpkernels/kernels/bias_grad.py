"""Sums over rows, deterministic: bias gradients, and the last step of every gradient left in partials.

    db = Σ over tokens of dy    (N,)    fp32

Rows are cut into chunks of a fixed length, each summed by one program in a fixed order; the sums are the rows
of a smaller matrix, summed alike. The result does not depend on the GPU, and there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.invariance import tile_of_sums
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import require_matrices
from tpkernels.kernels.target import target_of
from tpkernels.kernels.tiles import INTERPRETED_SUM, BlockTile

mend()


@triton.jit
def _sum_rows_kernel(
    source_ptr,  # (rows, cols)
    sums_ptr,  # (chunks, cols) contiguous, fp32
    rows,
    cols,
    stride_row,
    stride_col,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program sums one chunk of rows in one block of columns."""
    chunk = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    in_cols = col < cols
    # int64: rows * cols passes 2**31 at 512k tokens of width 4096
    columns = source_ptr + col.to(tl.int64)[None, :] * stride_col
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for step in range(0, CHUNK, BLOCK_ROWS):
        row = chunk.to(tl.int64) * CHUNK + step + tl.arange(0, BLOCK_ROWS)
        block = tl.load(columns + row[:, None] * stride_row, (row < rows)[:, None] & in_cols[None, :], 0.0)
        acc += block.to(tl.float32)
    tl.store(sums_ptr + chunk.to(tl.int64) * cols + col, tl.sum(acc, axis=0), in_cols)


@planned
def bias_grad(dy: Tensor, *, out: Tensor | None = None, tile: BlockTile | None = None) -> Tensor:
    """The sum of dy over tokens, in fp32.

    dy: (tokens, out_features)
    out: where the result is written
    returns: (out_features,)
    """
    require_matrices("bias_grad", ("dy", dy))
    target = target_of(dy.device)
    (sums,) = launch.results("bias_grad", out, {"db": (dy.shape[1],)}, (("dy", dy),))
    _sum_rows(dy, sums, tile or (INTERPRETED_SUM if target.backend == "interpreter" else tile_of_sums()))
    return sums


def sum_partials(partials: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The sum of (blocks, cols) fp32 partial sums, which some kernel left: (cols,), into `out` if given."""
    return bias_grad(partials, out=out)


def _sum_rows(matrix: Tensor, total: Tensor, tile: BlockTile) -> None:
    """total: (cols,)"""
    rows, cols = matrix.shape
    chunks = max(1, launch.ceil_div(rows, tile.chunk))  # no rows: one chunk of nothing, which is zero
    sums = total[None] if chunks == 1 else launch.empty((chunks, cols), torch.float32, matrix.device)
    if cols:
        launch.on(matrix.device, _sum_rows_kernel, (launch.ceil_div(cols, tile.block_cols), chunks))(
            matrix,
            sums,
            rows,
            cols,
            *matrix.stride(),
            CHUNK=tile.chunk,
            BLOCK_ROWS=tile.block_rows,
            BLOCK_COLS=tile.block_cols,
            num_warps=tile.num_warps,
        )
    if chunks > 1:
        _sum_rows(sums, total, tile)
