"""Rows of a vocabulary-parallel table by id: kernel and launcher. The oracle is `reference.embedding_ref`.

T tokens, H features; this rank's rows of the table are those of ids first_id ... first_id + V - 1:

    y[t] = weight[ids[t] - first_id]    (T, H)    zeros where another rank has the row

So the sum of the ranks' y is the lookup in the whole table, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.operands import require_ids, require_matrices
from tpkernels.kernels.target import launching_on, target_of
from tpkernels.kernels.tiles import EMBEDDING, INTERPRETED_EMBEDDING, EmbeddingTile

mend()


@triton.jit
def _embedding_fwd_kernel(
    ids_ptr,  # (T,) contiguous
    weight_ptr,  # (V, H)
    y_ptr,  # (T, H) contiguous
    T,
    V,
    H,
    first_id,
    stride_wv,
    stride_wh,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program looks up BLOCK_COLS features of BLOCK_ROWS tokens."""
    # int64: T * H passes 2**31 at 512k tokens of width 4096, and V * H with a table of as many rows
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    h = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    in_rows, in_cols = t < T, h < H
    row = tl.load(ids_ptr + t, in_rows, -1).to(tl.int64) - first_id
    ours = in_rows & (row >= 0) & (row < V)
    found = tl.load(
        weight_ptr + row[:, None] * stride_wv + h[None, :] * stride_wh, ours[:, None] & in_cols[None, :], 0.0
    )
    tl.store(y_ptr + t[:, None] * H + h[None, :], found, in_rows[:, None] & in_cols[None, :])


def embedding_fwd(
    ids: Tensor, weight: Tensor, *, first_id: int = 0, tile: EmbeddingTile | None = None
) -> Tensor:
    """The rows of this rank's part of a table, zeros for ids of other ranks.

    ids: (tokens,) of the whole table
    weight: (rows, features)
    first_id: the id of the first row
    returns: (tokens, features)
    """
    require_matrices("embedding_fwd", ("weight", weight))
    require_ids("embedding_fwd", "ids", ids, weight)
    target = target_of(weight.device)
    tile = tile or (INTERPRETED_EMBEDDING if target.backend == "interpreter" else EMBEDDING)
    T, (V, H) = len(ids), weight.shape
    y = launch.empty((T, H), weight.dtype, weight.device)
    if y.numel():
        grid = (launch.ceil_div(T, tile.block_rows), launch.ceil_div(H, tile.block_cols))
        with launching_on(weight.device):
            _embedding_fwd_kernel[grid](
                ids,
                weight,
                y,
                T,
                V,
                H,
                first_id,
                *weight.stride(),
                BLOCK_ROWS=tile.block_rows,
                BLOCK_COLS=tile.block_cols,
                num_warps=tile.num_warps,
            )
    return y
