"""`y = act(x wᵀ + b)` while x is being gathered: `linear` whose tiles wait for their rows.

T tokens, K in_features, N out_features; x (T, K) consists of equal chunks of rows, which others write:

    z = x wᵀ + b    (T, N)    accumulated in fp32, kept on request for the backward of the activation
    y = act(z)      (T, N)    of the fp32 z, not of the rounded one

The kernel starts at the rows that were here first and goes round the ring, as chunks arrive; a tile waits
for every chunk that it has rows of. Values, bits too, are those of `linear_fwd` with the same tile and form.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.blocks import load_block, load_vector, load_weight, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.linear import LinearForward
from tpkernels.kernels.operands import (
    Form,
    lies_depth_first,
    require_matrices,
    require_shape,
    require_tensors,
)
from tpkernels.kernels.target import left_free
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, require_arrivals, require_chunks, wait_for


@triton.jit
def ring_tile_at(index, first_tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Tile number `index`, where rows start at `first_tile` and go round."""
    row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
    return (first_tile + row_tile) % row_tiles, col_tile


@triton.jit
def wait_for_rows(
    t,
    BLOCK_ROWS: tl.constexpr,
    T,
    chunk_rows,
    flags_ptr,
    awaited_ptr,
    status_ptr,
    spin_limit,
    ASYNC_PROXY: tl.constexpr,
):
    """Return once the BLOCK_ROWS rows from t may be read: see `wait_for`."""
    first_chunk = t // chunk_rows
    last_chunk = (tl.minimum(t + BLOCK_ROWS, T) - 1) // chunk_rows
    # the maximum shows the compiler, and the gate, that no tile goes without a wait
    for later in tl.range(0, tl.maximum(last_chunk - first_chunk + 1, 1), num_stages=1):
        wait_for(
            first_chunk + later,
            flags_ptr,
            awaited_ptr,
            status_ptr,
            spin_limit,
            OP=1,
            ASYNC_PROXY=ASYNC_PROXY,
        )


@triton.jit
def _gather_linear_kernel(
    x,  # (T, K), like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K), or (K, N) if DEPTH_FIRST
    b_ptr,  # (N,), unread unless HAS_BIAS
    z,  # (T, N) contiguous, untouched unless KEEP_Z
    y,  # (T, N) contiguous
    flags_ptr,  # (T / chunk_rows,) int32
    awaited_ptr,  # (1,) int32
    status_ptr,  # (1,) int32
    T,
    N,
    K,
    stride_xt,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_bn,
    first_tile,  # the first tile of rows that are here from the start
    chunk_rows,
    spin_limit,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_Z: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
    ASYNC_PROXY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Each program computes every num_programs-th tile of y, in the order in which rows arrive."""
    # one loop over tiles and depth would start a tile's loads before its wait: the compiler sees no tie
    tl.static_assert(not FLATTEN, "a flattened loop loads rows before they are there")
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(T, BLOCK_ROWS)
    col_tiles = tl.cdiv(N, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row_tile, col_tile = ring_tile_at(index, first_tile, row_tiles, col_tiles, GROUP)
        t = row_tile * BLOCK_ROWS
        n = col_tile * BLOCK_COLS
        wait_for_rows(
            t, BLOCK_ROWS, T, chunk_rows, flags_ptr, awaited_ptr, status_ptr, spin_limit, ASYNC_PROXY
        )
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for k in range(0, K, BLOCK_DEPTH):
            x_block = load_block(x, t, k, T, K, stride_xt, stride_xk, BLOCK_ROWS, BLOCK_DEPTH, TMA)
            w_block = load_weight(
                w, n, k, N, K, stride_wn, stride_wk, BLOCK_COLS, BLOCK_DEPTH, DEPTH_FIRST, TMA
            )
            acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            n_part = n + p * PART
            value = parts[p]
            if HAS_BIAS:
                value += load_vector(b_ptr, n_part, N, stride_bn, PART)[None, :]
            if KEEP_Z:
                store_block(z, value, t, n_part, T, N, N, 1, TMA)
            store_block(y, act(value, ACTIVATION, FAST), t, n_part, T, N, N, 1, TMA)


@planned
def gather_linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    arrivals: Arrivals,
    first_row: int = 0,
    activation: Activation = "none",
    keep_z: bool = False,
    margin: int = 0,
    counted: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> LinearForward:
    """act(x weightᵀ + bias) in the dtype of x; each chunk of x is read once its flag is up.

    x: (tokens, in_features), as many equal chunks of rows as there are flags
    weight: (out_features, in_features); one that lies as (in_features, out_features) is read as it lies
    bias: (out_features,)
    first_row: where the rows begin that are here from the start
    margin: processors that are left to those who write x
    counted: those of them that torch's setting for collectives counts, too
    """
    require_matrices("gather_linear_fwd", ("x", x), ("weight", weight))
    require_tensors("gather_linear_fwd", ("x", x), ("bias", bias))
    require_activation("gather_linear_fwd", activation)
    require_arrivals("gather_linear_fwd", arrivals, x.device)
    (T, K), N, chunks = x.shape, weight.shape[0], arrivals.flags.numel()
    require_shape(
        "gather_linear_fwd", "weight", weight, (N, K), f"(out_features, in_features) for x {tuple(x.shape)}"
    )
    require_shape("gather_linear_fwd", "bias", bias, (N,), f"(out_features,) of weight {tuple(weight.shape)}")
    require_chunks("gather_linear_fwd", T, chunks, first_row)
    y = launch.empty((T, N), x.dtype, x.device)
    separate_z = keep_z and activation != "none"
    z = launch.empty((T, N), x.dtype, x.device) if separate_z else y
    depth_first = lies_depth_first(weight)
    stored = weight.t() if depth_first else weight
    matrices = (("x", x), ("weight", stored), ("the result", y))
    product = launch.product("gather_linear_fwd", "linear", matrices, (T, N), tile, form)
    reserved = left_free(product.target, margin, counted)
    product, programs = product.waiting("gather_linear_fwd", tile, T // chunks, reserved)
    if y.numel():
        y_block = product.block(y, "rows", "part")
        product.start(_gather_linear_kernel, programs)(
            product.block(x, "rows", "depth"),
            product.block(stored, "depth", "cols") if depth_first else product.block(stored, "cols", "depth"),
            y if bias is None else bias,
            product.block(z, "rows", "part") if separate_z else y_block,
            y_block,
            arrivals.flags,
            arrivals.awaited,
            arrivals.status,
            T,
            N,
            K,
            *x.stride(),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            product.first_tile(first_row),
            T // chunks,
            arrivals.limit(product.target),
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            KEEP_Z=separate_z,
            FAST=product.fast,
            PRECISION=product.precision,
            DEPTH_FIRST=depth_first,
            ASYNC_PROXY=product.by_async_proxy,
        )
    return LinearForward(y, z if keep_z else None)
