"""Embedding over this rank's rows, forward and backward. Oracles: `reference`.

T tokens, H features; this rank's V rows of the table are those of ids first_id ... first_id + V - 1:

    y[t]       = weight[ids[t] - first_id]                                (T, H)    zeros for other ranks' ids
    dweight[v] = Σ of dy[t] over the tokens t with ids[t] - first_id = v  (V, H)    in fp32, rounded once

The sum of the ranks' y is the lookup in the full table, exactly.

The backward is deterministic. Tokens are sorted by id, so that those of a row are neighbours, in the order
in which they came. One program sums them for some features of one row, and writes zeros for a row without
tokens: no atomics, no table to clear first. A frequent row is cut into splits of so many tokens, counted from
its first; other programs have added up the whole ones before. So its bits follow from its own tokens alone.
Ids of other ranks sort before the first row's tokens or after the last one's, and are never read. torch's own
backward would need them masked, and on the CPU sums in 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import DTYPES, require_ids, require_matrices
from tpkernels.kernels.target import target_of
from tpkernels.kernels.tiles import EMBEDDING, EMBEDDING_GRAD, INTERPRETED_EMBEDDING, BlockTile

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


@planned
def embedding_fwd(ids: Tensor, weight: Tensor, *, first_id: int = 0, tile: BlockTile | None = None) -> Tensor:
    """The rows of this rank's shard of a table, zeros for ids of other ranks.

    ids: (tokens,) of the full table
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
        launch.on(weight.device, _embedding_fwd_kernel, grid)(
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


@triton.jit
def _load_rows(dy_ptr, tokens_ptr, first, stop, h, H, stride_dt, stride_dh, BLOCK_ROWS: tl.constexpr):
    """dy of BLOCK_ROWS of the sorted tokens from first, in fp32; zeros from stop on."""
    place = first + tl.arange(0, BLOCK_ROWS)
    there = place < stop
    t = tl.load(tokens_ptr + place, there, 0)
    rows = dy_ptr + t[:, None] * stride_dt + h[None, :] * stride_dh
    return tl.load(rows, there[:, None] & (h < H)[None, :], 0.0).to(tl.float32)


@triton.jit
def _embedding_splits_kernel(
    dy_ptr,  # (T, H)
    tokens_ptr,  # (T,) contiguous: sorted by id
    ids_ptr,  # (T,) contiguous: their ids
    starts_ptr,  # (V + 1,) contiguous: where each row's tokens start among them
    splits_ptr,  # (T // SPLIT, H) contiguous, fp32
    V,
    H,
    first_id,
    stride_dt,
    stride_dh,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program sums BLOCK_COLS features of the whole split that starts among SPLIT tokens, if one does.

    No two do, and the one that does holds the last of these tokens.
    """
    number = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    last = number * SPLIT + SPLIT - 1
    row = tl.load(ids_ptr + last).to(tl.int64) - first_id
    if (row >= 0) & (row < V):
        start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        first = last - (last - start) % SPLIT
        if first + SPLIT <= stop:
            acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
            for step in tl.range(0, SPLIT, BLOCK_ROWS):
                acc += _load_rows(
                    dy_ptr, tokens_ptr, first + step, first + SPLIT, h, H, stride_dt, stride_dh, BLOCK_ROWS
                )
            tl.store(splits_ptr + number * H + h, tl.sum(acc, axis=0), h < H)


@triton.jit
def _embedding_bwd_kernel(
    dy_ptr,  # (T, H)
    tokens_ptr,  # (T,) contiguous: sorted by id
    starts_ptr,  # (V + 1,) contiguous: where each row's tokens start among them
    splits_ptr,  # (T // SPLIT, H) contiguous, fp32: sums of whole splits, in the order of their tokens
    dweight_ptr,  # (V, H) contiguous
    H,
    stride_dt,
    stride_dh,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program sums BLOCK_COLS features of one row, BLOCK_ROWS at a time: tokens left, and splits."""
    # int64: V * H passes 2**31 at 512k rows of width 4096
    v = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    start, stop = tl.load(starts_ptr + v), tl.load(starts_ptr + v + 1)
    whole = (stop - start) // SPLIT
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for first in tl.range(start + whole * SPLIT, stop, BLOCK_ROWS):
        acc += _load_rows(dy_ptr, tokens_ptr, first, stop, h, H, stride_dt, stride_dh, BLOCK_ROWS)
    splits_ptr += start // SPLIT * H
    whole = whole.to(tl.int32)  # int64 takes the registers of a block more
    for split in tl.range(0, whole, BLOCK_ROWS):
        place = split + tl.arange(0, BLOCK_ROWS)
        rows = splits_ptr + place[:, None].to(tl.int64) * H + h[None, :]
        acc += tl.load(rows, (place < whole)[:, None] & (h < H)[None, :], 0.0)
    dweight = tl.sum(acc, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + v * H + h, dweight, h < H)


@planned
def embedding_bwd(
    dy: Tensor,
    ids: Tensor,
    *,
    rows: int,
    first_id: int = 0,
    dtype: torch.dtype | None = None,
    tile: BlockTile | None = None,
) -> Tensor:
    """The gradient of this rank's shard of a table.

    dy: (tokens, features), of the full lookup
    ids: (tokens,) of the full table
    rows: how many rows of the table this rank holds
    first_id: the id of the first row
    dtype: of the result, by default that of dy
    returns: (rows, features)
    """
    require_matrices("embedding_bwd", ("dy", dy))
    require_ids("embedding_bwd", "ids", ids, dy, dy.shape[0])
    if dtype not in (None, *DTYPES):
        raise TypeError(f"embedding_bwd: expected bfloat16, float16 or float32 as dtype, got {dtype}")
    target = target_of(dy.device)
    tile = tile or (INTERPRETED_EMBEDDING if target.backend == "interpreter" else EMBEDDING_GRAD)
    H = dy.shape[1]
    dweight = launch.empty((rows, H), dtype or dy.dtype, dy.device)
    if dweight.numel():
        sorted_ids, tokens = torch.sort(ids, stable=True)
        starts = torch.searchsorted(
            sorted_ids, torch.arange(first_id, first_id + rows + 1, dtype=ids.dtype, device=ids.device)
        )
        constants = {"SPLIT": tile.chunk, "BLOCK_ROWS": tile.block_rows, "BLOCK_COLS": tile.block_cols}
        col_blocks = launch.ceil_div(H, tile.block_cols)
        splits = launch.empty((len(ids) // tile.chunk, H), torch.float32, dy.device)
        if splits.numel():  # else no row has a whole one
            launch.on(dy.device, _embedding_splits_kernel, (len(splits), col_blocks))(
                dy,
                tokens,
                sorted_ids,
                starts,
                splits,
                rows,
                H,
                first_id,
                *dy.stride(),
                **constants,
                num_warps=tile.num_warps,
            )
        launch.on(dy.device, _embedding_bwd_kernel, (rows, col_blocks))(
            dy,
            tokens,
            starts,
            splits,
            dweight,
            H,
            *dy.stride(),
            **constants,
            num_warps=tile.num_warps,
        )
    return dweight
