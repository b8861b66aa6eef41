"""Fused `y = act(x wᵀ + b)`: kernel and launcher. The oracle is `reference.linear_ref`.

T tokens, K in_features, N out_features:

    z = x wᵀ + b    (T, N)    accumulated in fp32, kept on request for the backward of the activation
    y = act(z)      (T, N)    of the fp32 z, not of the rounded one
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.blocks import add_products, load_vector, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, require_matrices, require_shape, require_tensors
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, Wait, arrived


@triton.jit
def _linear_fwd_kernel(
    x,  # (T, K), like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K)
    b_ptr,  # (N,), unread unless HAS_BIAS
    z,  # (T, N) contiguous, untouched unless KEEP_Z
    y,  # (T, N) contiguous
    T,
    N,
    K,
    stride_xt,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_bn,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_Z: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
    flags_ptr=None,  # the rest as `waits.arrived` takes it; None: x is here
    awaited_ptr=None,
    status_ptr=None,
    first_tile=None,
    chunk_rows=None,
    spin_limit=None,
    ASYNC_PROXY: tl.constexpr = None,
):
    """Each program computes every num_programs-th tile of y."""
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(T, BLOCK_ROWS)
    col_tiles = tl.cdiv(N, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row_tile = arrived(
            *(row_tile, row_tiles, T, flags_ptr, awaited_ptr, status_ptr, first_tile, chunk_rows),
            *(spin_limit, BLOCK_ROWS, FLATTEN, ASYNC_PROXY),
        )
        t = row_tile * BLOCK_ROWS
        n = col_tile * BLOCK_COLS
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        acc = add_products(
            *(acc, x, w, t, n, T, N, K, stride_xt, stride_xk, stride_wn, stride_wk),
            *(False, PRECISION, BLOCK_DEPTH, TMA),
        )
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            n_part = n + p * PART
            value = parts[p]
            if HAS_BIAS:
                # Neither before the loop over k nor all parts at once: 128x256 spills then. The assembler
                # starts the loads of the first part beside the last product as it is.
                value += load_vector(b_ptr, n_part, N, stride_bn, PART)[None, :]
            if KEEP_Z:
                store_block(z, value, t, n_part, T, N, N, 1, TMA)
            store_block(y, act(value, ACTIVATION, FAST), t, n_part, T, N, N, 1, TMA)


class LinearForward(NamedTuple):
    """What `linear_fwd` returns."""

    y: Tensor  # (tokens, out_features)
    z: Tensor | None  # the pre-activation if it was asked for; y itself where there is no activation


@planned
def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    keep_z: bool = False,
    out: launch.Out = None,
    arrivals: Arrivals | None = None,
    first_row: int = 0,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> LinearForward:
    """act(x weightᵀ + bias) in the dtype of x.

    x: (tokens, in_features)
    weight: (out_features, in_features)
    bias: (out_features,)
    out: where y is written, and z if it is kept and not y; rows of larger matrices, say. Without activation
        it may be in fp32
    arrivals: of the chunks of x, each of which is read once its flag is up; None: all is here
    first_row, margin: as of `waits.Wait`
    """
    require_matrices("linear_fwd", ("x", x), ("weight", weight))
    require_tensors("linear_fwd", ("x", x), ("bias", bias))
    require_activation("linear_fwd", activation)
    (T, K), N = x.shape, weight.shape[0]
    require_shape(
        "linear_fwd", "weight", weight, (N, K), f"(out_features, in_features) for x {tuple(x.shape)}"
    )
    require_shape("linear_fwd", "bias", bias, (N,), f"(out_features,) of weight {tuple(weight.shape)}")
    separate_z = keep_z and activation != "none"
    wanted = {"y": (T, N), "z": (T, N)} if separate_z else {"y": (T, N)}
    inputs = (("x", x), ("weight", weight))
    plain = activation == "none"
    written = launch.results("linear_fwd", out, wanted, (*inputs, ("bias", bias)), sums=plain)
    y, z = written[0], written[-1]
    matrices = (*inputs, ("y", y), ("z", z))
    wait = Wait(arrivals, first_row, margin)
    product = launch.product("linear_fwd", "linear", matrices, (T, N), tile, form, wait)
    if y.numel():
        y_block = product.block(y, "rows", "part")
        product.start(_linear_fwd_kernel)(
            product.block(x, "rows", "depth"),
            product.block(weight, "cols", "depth"),
            y if bias is None else bias,
            product.block(z, "rows", "part") if separate_z else y_block,
            y_block,
            T,
            N,
            K,
            *x.stride(),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            KEEP_Z=separate_z,
            FAST=product.fast,
            PRECISION=product.precision,
        )
    return LinearForward(y, z if keep_z else None)
