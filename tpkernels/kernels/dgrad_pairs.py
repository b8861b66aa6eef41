"""Gradient of an x that two linear layers share: one accumulator. The oracle is `reference.dgrad_pairs_ref`.

T tokens, N and M out_features, K in_features:

    dx = dy w + dy2 w2    (T, K)    summed in fp32 and rounded once: no product is written on its own
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import load_block, split_columns, store_block, tile_at
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, require_matrices, require_shape
from tpkernels.kernels.tiles import MatmulTile, without_spills


@triton.jit
def _dgrad_pairs_kernel(
    dy,  # (T, N), like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K)
    dy2,  # (T, M)
    w2,  # (M, K)
    dx,  # (T, K) contiguous
    T,
    N,
    M,
    K,
    stride_dyt,
    stride_dyn,
    stride_wn,
    stride_wk,
    stride_dy2t,
    stride_dy2m,
    stride_w2m,
    stride_w2k,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Each program computes every num_programs-th tile of dx."""
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(T, BLOCK_ROWS)
    col_tiles = tl.cdiv(K, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        t = row_tile * BLOCK_ROWS
        k = col_tile * BLOCK_COLS
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for n in range(0, N, BLOCK_DEPTH):
            dy_block = load_block(dy, t, n, T, N, stride_dyt, stride_dyn, BLOCK_ROWS, BLOCK_DEPTH, TMA)
            w_block = load_block(w, n, k, N, K, stride_wn, stride_wk, BLOCK_DEPTH, BLOCK_COLS, TMA)
            acc = tl.dot(dy_block, w_block, acc, input_precision=PRECISION)
        for m in range(0, M, BLOCK_DEPTH):
            dy_block = load_block(dy2, t, m, T, M, stride_dy2t, stride_dy2m, BLOCK_ROWS, BLOCK_DEPTH, TMA)
            w_block = load_block(w2, m, k, M, K, stride_w2m, stride_w2k, BLOCK_DEPTH, BLOCK_COLS, TMA)
            acc = tl.dot(dy_block, w_block, acc, input_precision=PRECISION)
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            store_block(dx, parts[p], t, k + p * PART, T, K, K, 1, TMA)


@planned
def dgrad_pairs(
    dy: Tensor,
    weight: Tensor,
    dy2: Tensor,
    weight2: Tensor,
    *,
    out: launch.Out = None,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> Tensor:
    """dy weight + dy2 weight2, the gradient of the x of `x weightᵀ` and `x weight2ᵀ`, in the dtype of dy.

    dy, dy2: (tokens, out_features), each of its weight
    weight, weight2: (out_features, in_features)
    out: where the result is written; rows of a larger matrix, say. It may be in fp32
    returns: (tokens, in_features)
    """
    name = "dgrad_pairs"
    require_matrices(name, ("dy", dy), ("weight", weight), ("dy2", dy2), ("weight2", weight2))
    (T, N), (M, K) = dy.shape, weight2.shape
    require_shape(name, "weight", weight, (N, K), "(out_features of dy, in_features of weight2)")
    require_shape(name, "dy2", dy2, (T, M), "(tokens of dy, out_features of weight2)")
    operands = (("dy", dy), ("weight", weight), ("dy2", dy2), ("weight2", weight2))
    (dx,) = launch.results(name, out, {"dx": (T, K)}, operands, sums=True)
    product = launch.product(name, "dgrad", (*operands, ("the result", dx)), (T, K), tile, form)
    product = product._replace(tile=without_spills("dgrad_pairs", product.tile))
    if dx.numel():
        product.start(_dgrad_pairs_kernel)(
            product.block(dy, "rows", "depth"),
            product.block(weight, "depth", "cols"),
            product.block(dy2, "rows", "depth"),
            product.block(weight2, "depth", "cols"),
            product.block(dx, "rows", "part"),
            T,
            N,
            M,
            K,
            *dy.stride(),
            *weight.stride(),
            *dy2.stride(),
            *weight2.stride(),
            PRECISION=product.precision,
        )
    return dx
