"""`gather_linear` of rows in fp8: `scaled_linear` whose tiles wait for their rows.

Rows bring their scales along, as words (see `scaled`): one flag tells of both. The kernel waits as
`gather_linear` does, and computes as `scaled_linear` does. Values, bits too, are those of `scaled_linear_fwd`
with the same tile and form.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.gather_linear import ring_tile_at, wait_for_rows
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.linear import LinearForward
from tpkernels.kernels.operands import Form
from tpkernels.kernels.scaled_linear import Promotion, ScaledProduct, scaled_tile
from tpkernels.kernels.target import fast_math, left_free
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, require_arrivals, require_chunks


@triton.jit
def _gather_scaled_linear_kernel(
    x,  # (T, K) of fp8, like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K) of fp8
    x_scale_ptr,  # (T, S) fp32
    w_scale_ptr,  # (N, S) fp32, or a row for each SHARED rows of w
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
    stride_wn,
    stride_xst,
    stride_xss,
    stride_wsn,
    stride_wss,
    stride_bn,
    first_tile,  # the first tile of rows that are here from the start
    chunk_rows,
    spin_limit,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_Z: tl.constexpr,
    FAST: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PROMOTE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TURNS: tl.constexpr,
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
    row_tiles = tl.cdiv(T, BLOCK_ROWS)
    col_tiles = tl.cdiv(N, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row_tile, col_tile = ring_tile_at(index, first_tile, row_tiles, col_tiles, GROUP)
        t = row_tile * BLOCK_ROWS
        wait_for_rows(
            t, BLOCK_ROWS, T, chunk_rows, flags_ptr, awaited_ptr, status_ptr, spin_limit, ASYNC_PROXY
        )
        scaled_tile(
            x,
            w,
            x_scale_ptr,
            w_scale_ptr,
            b_ptr,
            z,
            y,
            t,
            col_tile * BLOCK_COLS,
            T,
            N,
            K,
            stride_xt,
            stride_wn,
            stride_xst,
            stride_xss,
            stride_wsn,
            stride_wss,
            stride_bn,
            ACTIVATION,
            HAS_BIAS,
            KEEP_Z,
            FAST,
            BY_BLOCK,
            SHARED,
            PROMOTE,
            IN_PLACE,
            TURNS,
            BLOCK_ROWS,
            BLOCK_COLS,
            BLOCK_DEPTH,
            PARTS,
            TMA,
        )


@planned
def gather_scaled_linear_fwd(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    arrivals: Arrivals,
    first_row: int = 0,
    activation: Activation = "none",
    keep_z: bool = False,
    dtype: str = "bfloat16",
    fast_accumulate: bool = False,
    margin: int = 0,
    counted: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> LinearForward:
    """act(x̂ ŵᵀ + bias) in `dtype`; each chunk of x and of its scales is read once its flag is up.

    Operands as of `scaled_linear_fwd`, the others as of `gather_linear_fwd`
    """
    name = "gather_scaled_linear_fwd"
    T, N, K, into = ScaledProduct.required(name, x, weight, x_scale, w_scale, bias, activation, dtype)
    require_arrivals(name, arrivals, x.device)
    chunks = arrivals.flags.numel()
    require_chunks(name, T, chunks, first_row)
    y = launch.empty((T, N), into, x.device)
    separate_z = keep_z and activation != "none"
    z = launch.empty((T, N), into, x.device) if separate_z else y
    matrices = (("x", x), ("weight", weight), ("the result", y))
    product = launch.product(name, "linear", matrices, (T, N), tile, form)
    reserved = left_free(product.target, margin, counted)
    product, programs = product.waiting(name, tile, T // chunks, reserved)
    promotion = Promotion.of(name, product, x_scale, w_scale, fast_accumulate)
    if y.numel():
        y_block = product.block(y, "rows", "part")
        product.start(_gather_scaled_linear_kernel, programs)(
            product.block(x, "rows", "depth"),
            product.columns_cut(promotion.TURNS).block(weight, "cols", "depth"),
            x_scale,
            w_scale,
            y if bias is None else bias,
            product.block(z, "rows", "part") if separate_z else y_block,
            y_block,
            arrivals.flags,
            arrivals.awaited,
            arrivals.status,
            T,
            N,
            K,
            x.stride(0),
            weight.stride(0),
            *x_scale.stride(),
            *w_scale.stride(),
            0 if bias is None else bias.stride(0),
            product.first_tile(first_row),
            T // chunks,
            arrivals.limit(product.target),
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            KEEP_Z=separate_z,
            FAST=fast_math(into, product.target),
            ASYNC_PROXY=product.by_async_proxy,
            **promotion._asdict(),
        )
    return LinearForward(y, z if keep_z else None)
