"""MXFP8: rows in fp8 with a scale of one byte, a power of two, for each 32 elements: kernels and launchers.

T tokens, K in_features, N out_features, S = K / 32 scales a row, see `scaled`:

    mx_linear_fwd   y = act(Σ_s (x_s w_sᵀ) 2^(x_scale[:, s] - 127) 2^(w_scale[:, s] - 127)ᵀ + b)     (T, N)
    quantize_mx     rows of x with scales along K, rows of xᵀ with scales along T, or both at once

Blackwell's tensor cores scale each product of 32 themselves, and add in fp32. A tile of the quantizer holds
whole blocks of 32 x 32, so that both results come of one reading. The oracles are `dispatch.scaled`'s and
`scaled.quantize_ref`, whose words are these bit for bit.
"""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.blocks import load_block, load_vector, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.linear import LinearForward
from tpkernels.kernels.operands import (
    FP8,
    Form,
    MatrixLayout,
)
from tpkernels.kernels.recipe import MX_BLOCK, Format
from tpkernels.kernels.scaled import words_of
from tpkernels.kernels.scaled_linear import ScaledProduct
from tpkernels.kernels.target import fast_math, target_of
from tpkernels.kernels.tiles import MatmulTile, mx_tiles

mend()


@triton.jit
def _mx_linear_kernel(
    x,  # (T, K) of fp8, like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K) of fp8
    x_scale_ptr,  # (T, S) bytes
    w_scale_ptr,  # (N, S) bytes
    b_ptr,  # (N,), unread unless HAS_BIAS
    z,  # (T, N) contiguous, untouched unless KEEP_Z
    y,  # (T, N) contiguous
    T,
    N,
    K,
    S,
    stride_xt,
    stride_wn,
    stride_xst,
    stride_wsn,
    stride_bn,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_Z: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Each program computes every num_programs-th tile of y."""
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(T, BLOCK_ROWS)
    col_tiles = tl.cdiv(N, BLOCK_COLS)
    for index in tl.range(
        tl.program_id(0),
        row_tiles * col_tiles,
        tl.num_programs(0),
        flatten=FLATTEN,
        warp_specialize=SPECIALIZE,
    ):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        t = row_tile * BLOCK_ROWS
        n = col_tile * BLOCK_COLS
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for k in range(0, K, BLOCK_DEPTH):
            x_block = load_block(x, t, k, T, K, stride_xt, 1, BLOCK_ROWS, BLOCK_DEPTH, TMA)
            w_block = load_block(w, n, k, N, K, stride_wn, 1, BLOCK_COLS, BLOCK_DEPTH, TMA)
            s = k // 32
            x_scale = _load_scales(x_scale_ptr, t, s, T, S, stride_xst, BLOCK_ROWS, BLOCK_DEPTH // 32)
            w_scale = _load_scales(w_scale_ptr, n, s, N, S, stride_wsn, BLOCK_COLS, BLOCK_DEPTH // 32)
            acc = tl.dot_scaled(
                x_block, x_scale, tl.constexpr(X_FORMAT), w_block.T, w_scale, tl.constexpr(W_FORMAT), acc
            )
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            n_part = n + p * PART
            value = parts[p]
            if HAS_BIAS:
                value += load_vector(b_ptr, n_part, N, stride_bn, PART)[None, :]
            if KEEP_Z:
                store_block(z, value, t, n_part, T, N, N, 1, TMA)
            store_block(y, act(value, ACTIVATION, FAST), t, n_part, T, N, N, 1, TMA)


@triton.jit
def _load_scales(source, row, s, rows, S, stride, ROWS: tl.constexpr, SCALES: tl.constexpr):
    """The scales of a block; beyond the edges, where data is zero, the smallest one."""
    r = row + tl.arange(0, ROWS)
    c = s + tl.arange(0, SCALES)
    mask = (r < rows)[:, None] & (c < S)[None, :]
    return tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], mask=mask, other=0)


@planned
def mx_linear_fwd(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    keep_z: bool = False,
    dtype: str = "bfloat16",
    out: launch.Out = None,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> LinearForward:
    """`scaled_linear_fwd` of operands whose scales are bytes: (tokens, S) and (out_features, S)."""
    name = "scaled_linear_fwd"
    required = ScaledProduct.required(name, x, weight, x_scale, w_scale, bias, activation, dtype, mx=True)
    T, N, K, into = required
    separate_z = keep_z and activation != "none"
    wanted = {"y": (T, N), "z": (T, N)} if separate_z else {"y": (T, N)}
    inputs = (("x", x), ("weight", weight), ("x_scale", x_scale), ("w_scale", w_scale), ("bias", bias))
    written = launch.results(name, out, wanted, inputs, dtype=into)
    y, z = written[0], written[-1]
    matrices = (("x", x), ("weight", weight), ("y", y), ("z", z))
    ragged = any(MatrixLayout.of("", matrix).tma_obstacle() for _, matrix in matrices)
    product = launch.product(name, "linear", matrices, (T, N), tile, form)
    product = product._replace(tile=tile or mx_tiles(product.form, product.target, ragged)[0])
    if product.tile.consumers or product.tile.block_depth % MX_BLOCK:
        raise ValueError(
            f"{name}: expected a tile whose depth is a multiple of {MX_BLOCK}, without consumers, got "
            f"{product.tile}"
        )
    if y.numel():
        y_block = product.block(y, "rows", "part")
        product.start(_mx_linear_kernel)(
            product.block(x, "rows", "depth"),
            product.block(weight, "cols", "depth"),
            x_scale,
            w_scale,
            y if bias is None else bias,
            product.block(z, "rows", "part") if separate_z else y_block,
            y_block,
            T,
            N,
            K,
            x_scale.shape[1],
            x.stride(0),
            weight.stride(0),
            x_scale.stride(0),
            w_scale.stride(0),
            0 if bias is None else bias.stride(0),
            X_FORMAT=_FORMAT_OF[x.dtype],
            W_FORMAT=_FORMAT_OF[weight.dtype],
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            KEEP_Z=separate_z,
            FAST=fast_math(into, product.target),
        )
    return LinearForward(y, z if keep_z else None)


FORMATS = get_args(Format)
_FORMAT_OF = dict(zip(FP8, FORMATS, strict=True))


@triton.jit
def _exponents(amax, FORMAT: tl.constexpr):
    """The byte of each scale, from the bits of the largest size: `scaled.mx_scale_ref`."""
    largest = 448.0 if FORMAT == "e4m3" else 57344.0
    scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), largest), 1.1754943508222875e-38)
    exponent = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) >> 23  # of the next power of two above
    exponent = tl.where(amax == 0, 127, exponent)  # 1
    return tl.where(amax < 0x7F800000, exponent, 255)  # else infinity or NaN: NaN


@triton.jit
def _store_data(target, values, exponent, offsets, mask, FORMAT: tl.constexpr):
    """v / scale, or zeros where the scale is NaN."""
    fp8: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
    is_number = exponent < 255
    # exact, as the scale is a power of two
    inverse = ((254 - tl.where(is_number, exponent, 127)) << 23).to(tl.float32, bitcast=True)
    data = tl.where(is_number, values * inverse, 0.0).to(fp8)
    tl.store(target.to(tl.pointer_type(fp8)) + offsets, data, mask)


@triton.jit
def _pad(target, row, in_rows, first, pitch):
    """Zeros behind the scales of these rows, to the end of a line at most."""
    i = first + tl.arange(0, 128)
    zeros = tl.zeros((row.shape[0], 128), tl.uint8)
    tl.store(target + row[:, None] * pitch + i[None, :], zeros, in_rows[:, None] & (i < pitch)[None, :])


@triton.jit
def _quantize_mx_kernel(
    x_ptr,  # (T, K)
    u_ptr,  # (T, K), unread unless GATED
    rows_ptr,  # (T, pitch) bytes, contiguous, untouched unless ROWS
    columns_ptr,  # (K, column_pitch) bytes, contiguous, untouched unless COLUMNS
    T,
    K,
    stride_xt,
    stride_xk,
    stride_ut,
    stride_uk,
    scales_at,  # the byte of a row of words at which its scales begin: K, rounded up to words
    pitch,  # bytes of a row of words
    column_scales_at,
    column_pitch,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,  # of a tile
):
    """One program reads SIDE x SIDE elements once."""
    SCALES: tl.constexpr = SIDE // 32
    col_tiles = tl.cdiv(K, SIDE)
    row_tile, col_tile = tl.program_id(0) // col_tiles, tl.program_id(0) % col_tiles
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = row_tile.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    k = col_tile.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    mask = (t < T)[:, None] & (k < K)[None, :]
    x_offsets = t[:, None] * stride_xt + k[None, :] * stride_xk
    values = act(tl.load(x_ptr + x_offsets, mask, 0.0).to(tl.float32), ACTIVATION, FAST)
    if GATED:
        u_offsets = t[:, None] * stride_ut + k[None, :] * stride_uk
        values *= tl.load(u_ptr + u_offsets, mask, 0.0).to(tl.float32)
    sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # which have the order of |v|, with NaN on top
    if ROWS:
        exponent = _exponents(tl.max(tl.reshape(sizes, (SIDE, SCALES, 32)), axis=2), FORMAT)
        each = tl.reshape(tl.broadcast_to(exponent[:, :, None], (SIDE, SCALES, 32)), (SIDE, SIDE))
        inside = (t < T)[:, None] & (k < scales_at)[None, :]
        _store_data(rows_ptr, values, each, t[:, None] * pitch + k[None, :], inside, FORMAT)
        s = col_tile * SCALES + tl.arange(0, SCALES)
        inside = (t < T)[:, None] & (s < tl.cdiv(K, 32))[None, :]
        tl.store(rows_ptr + t[:, None] * pitch + scales_at + s[None, :], exponent.to(tl.uint8), inside)
        if col_tile == col_tiles - 1:
            _pad(rows_ptr, t, t < T, scales_at + tl.cdiv(K, 32), pitch)
    if COLUMNS:
        exponent = _exponents(tl.max(tl.reshape(sizes, (SCALES, 32, SIDE)), axis=1), FORMAT)
        each = tl.reshape(tl.broadcast_to(exponent[:, None, :], (SCALES, 32, SIDE)), (SIDE, SIDE))
        inside = (t < column_scales_at)[:, None] & (k < K)[None, :]
        _store_data(columns_ptr, values, each, k[None, :] * column_pitch + t[:, None], inside, FORMAT)
        s = row_tile * SCALES + tl.arange(0, SCALES)
        inside = (s < tl.cdiv(T, 32))[:, None] & (k < K)[None, :]
        offsets = k[None, :] * column_pitch + column_scales_at + s[:, None]
        tl.store(columns_ptr + offsets, exponent.to(tl.uint8), inside)
        if row_tile == tl.cdiv(T, SIDE) - 1:
            _pad(columns_ptr, k, k < K, column_scales_at + tl.cdiv(T, 32), column_pitch)


SIDE, NUM_WARPS = 64, 4


def quantize_mx(
    x: Tensor,
    u: Tensor | None,
    *,
    format: Format,
    activation: Activation = "none",
    rows: Tensor | None,
    columns: Tensor | None,
) -> None:
    """Write the words of f(x), or of f(x) * u, into rows (T, words of K), and into columns (K, words of T).

    Whoever calls has checked the operands. x that lies by columns is read so.
    """
    if x.stride(0) == 1 != x.stride(1):
        x, u, rows, columns = x.t(), None if u is None else u.t(), columns, rows
    T, K = x.shape
    if not T * K:
        return
    like = next(words for words in (rows, columns) if words is not None)
    row_words, column_words = (like if words is None else words for words in (rows, columns))
    launch.on(x.device, _quantize_mx_kernel, (launch.ceil_div(T, SIDE) * launch.ceil_div(K, SIDE),))(
        x,
        x if u is None else u,
        row_words.view(torch.uint8),
        column_words.view(torch.uint8),
        T,
        K,
        *x.stride(),
        *(x if u is None else u).stride(),
        4 * launch.ceil_div(K, 4),
        4 * words_of(K, "mx"),
        4 * launch.ceil_div(T, 4),
        4 * words_of(T, "mx"),
        FORMAT=format,
        ACTIVATION=activation,
        GATED=u is not None,
        FAST=fast_math(x.dtype, target_of(x.device)),
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        SIDE=SIDE,
        num_warps=NUM_WARPS,
    )
