"""Weight gradient of a linear layer, written or accumulated in place. Oracles: `reference`.

T tokens, N out_features, K in_features:

    dw         = dyᵀ x    (N, K)    `wgrad`
    main_grad += dyᵀ x    (N, K)    `wgrad_accumulate_`: no separate dw, no separate addition

An fp32 main_grad of the descriptor form is accumulated by the copy engine (TMA reduce-add), so that the old
values never pass through registers. Each element has one writer, hence the same bits every time. A 16-bit
main_grad is read, added in fp32 and rounded once.

Where a result has too few tiles for all processors, a tile with `splits` computes each of them that often, of
every `splits`-th block of tokens. The fp32 sums go into as many slots, which a second kernel adds in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import load_block, split_columns, store_block, tile_at
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import DTYPES, Form, require_matrices, require_shape, require_writable
from tpkernels.kernels.reduce import add_slots
from tpkernels.kernels.tiles import MatmulTile


@triton.jit
def _wgrad_kernel(
    dy,  # (T, N), like every matrix here a tensor descriptor if TMA, else a pointer
    x,  # (T, K)
    dw,  # (N, K), or if SPLITS > 1 (SPLITS * rows of whole tiles, K) in fp32: the slots one below the other
    T,
    N,
    K,
    stride_dyt,
    stride_dyn,
    stride_xt,
    stride_xk,
    stride_dwn,
    stride_dwk,
    ACCUMULATE: tl.constexpr,
    REDUCE: tl.constexpr,  # by the copy engine
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Each program computes every num_programs-th tile of dw, or of the slots."""
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(N, BLOCK_ROWS)
    col_tiles = tl.cdiv(K, BLOCK_COLS)
    rows = N if SPLITS == 1 else SPLITS * row_tiles * BLOCK_ROWS  # of dw
    items = SPLITS * row_tiles * col_tiles
    for index in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
        split = index % SPLITS
        row_tile, col_tile = tile_at(index // SPLITS, row_tiles, col_tiles, GROUP)
        n = row_tile * BLOCK_ROWS
        k = col_tile * BLOCK_COLS
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        # the same number of steps in each split, so that loops can be flattened; zeros are loaded past T
        for step in range(0, T, SPLITS * BLOCK_DEPTH):
            t = step + split * BLOCK_DEPTH
            dy_block = load_block(dy, t, n, T, N, stride_dyt, stride_dyn, BLOCK_DEPTH, BLOCK_ROWS, TMA)
            x_block = load_block(x, t, k, T, K, stride_xt, stride_xk, BLOCK_DEPTH, BLOCK_COLS, TMA)
            acc = tl.dot(dy_block.T, x_block, acc, input_precision=PRECISION)
        row = n
        if SPLITS > 1:
            slot_row = split.to(tl.int64) * row_tiles * BLOCK_ROWS
            row += slot_row.to(tl.int32) if TMA else slot_row  # coordinates are int32
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            k_part = k + p * PART
            value = parts[p]
            if REDUCE:
                dw.atomic_add([row, k_part], value)
            else:
                if ACCUMULATE:
                    old = load_block(dw, row, k_part, rows, K, stride_dwn, stride_dwk, BLOCK_ROWS, PART, TMA)
                    value += old.to(tl.float32)
                store_block(dw, value, row, k_part, rows, K, stride_dwn, stride_dwk, TMA)


@planned
def wgrad(
    dy: Tensor,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> Tensor:
    """dyᵀ x, the gradient of w in `x wᵀ`, in `dtype` or else that of x.

    dy: (tokens, out_features)
    x: (tokens, in_features)
    returns: (out_features, in_features)
    """
    _require_pair("wgrad", dy, x)
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"wgrad: expected dtype bfloat16, float16 or float32, got {dtype}")
    dw = launch.empty((dy.shape[1], x.shape[1]), dtype or x.dtype, x.device)
    _launch("wgrad", dw, dy, x, False, tile, form)
    return dw


@planned
def wgrad_accumulate_(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> None:
    """main_grad += dyᵀ x, in place; main_grad may be of another dtype than dy and x.

    main_grad: (out_features, in_features)
    dy: (tokens, out_features)
    x: (tokens, in_features)
    """
    _require_pair("wgrad_accumulate_", dy, x)
    require_writable("wgrad_accumulate_", "main_grad", main_grad, x.device)
    shape = (dy.shape[1], x.shape[1])
    require_shape(
        "wgrad_accumulate_", "main_grad", main_grad, shape, "(out_features, in_features) of dy and x"
    )
    _launch("wgrad_accumulate_", main_grad, dy, x, True, tile, form)


def _require_pair(launcher: str, dy: Tensor, x: Tensor) -> None:
    require_matrices(launcher, ("dy", dy), ("x", x))
    if dy.shape[0] != x.shape[0]:
        raise ValueError(
            f"{launcher}: expected dy (tokens, out_features) and x (tokens, in_features) of equal tokens, "
            f"got {tuple(dy.shape)} and {tuple(x.shape)}"
        )


def _launch(
    launcher: str,
    dw: Tensor,
    dy: Tensor,
    x: Tensor,
    accumulate: bool,
    tile: MatmulTile | None,
    form: Form | None,
) -> None:
    (T, N), K = dy.shape, x.shape[1]
    matrices = (("dy", dy), ("x", x), ("main_grad" if accumulate else "the result", dw))
    product = launch.product(launcher, "wgrad", matrices, (N, K), tile, form)
    if dw.numel() == 0:
        return
    splits = product.tile.splits
    sums = dw if splits == 1 else _slots(product.tile, dw)
    accumulate_here = accumulate and sums is dw
    reduces = accumulate_here and product.form == "descriptor" and dw.dtype == torch.float32
    product.start(_wgrad_kernel)(
        product.block(dy, "depth", "rows"),
        product.block(x, "depth", "cols"),
        product.block(sums, "rows", "part"),
        T,
        N,
        K,
        *dy.stride(),
        *x.stride(),
        *sums.stride(),
        ACCUMULATE=accumulate_here,
        REDUCE=reduces,
        PRECISION=product.precision,
        SPLITS=splits,
    )
    if sums is not dw:
        add_slots(dw, sums.unflatten(0, (splits, -1))[:, :N], accumulate=accumulate)


def _slots(tile: MatmulTile, dw: Tensor) -> Tensor:
    """A slot like dw for each split, one below the other.

    Their rows are those of whole tiles, so that a tile reaches into no other slot, and lie in whole 16-byte
    units, for descriptors.
    """
    N, K = dw.shape
    rows = tile.splits * launch.ceil_div(N, tile.block_rows) * tile.block_rows
    return launch.empty((rows, launch.ceil_div(K, 4) * 4), torch.float32, dw.device)[:, :K]
