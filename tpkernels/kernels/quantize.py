"""Rows rounded to fp8, and their scales: kernels and launchers. The oracle is `scaled.quantize_ref`.

T rows, K columns, S scales a row; `scaled` says how words hold them:

    v      = x, f(x) or f(g) * u                        (T, K)    in fp32, never written
    amax   = max |v| of a row, or of 128 of its elements, or of 128 x 128
    scale  = amax / the format's largest number         (T, S)
    data   = v / scale                                  (T, K)    rounded to fp8, nearest even

The bits are those of the oracle: both divisions are true ones, and sizes are compared as integers, in whose
order NaN is above infinity (a maximum of floating-point numbers drops NaN). An activation has other last bits
than torch's: an element next to the middle of two numbers of fp8 may then go to the other one.

x may lie in memory by rows or by columns (`w.t()`), and is read along its memory either way; what is written
is rows. Scales of rows need all of a row first: a program holds rows of up to 16k columns, and reads longer
ones, and columns, twice. The second time goes backwards, as what was read last is still in the cache.

"""

from __future__ import annotations

from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.epilogues import act
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import require_matrices
from tpkernels.kernels.recipe import BLOCK, Format, Scaling
from tpkernels.kernels.scaled import words_of
from tpkernels.kernels.target import fast_math, require_fp8, target_of
from tpkernels.kernels.tiles import MAX_FEATURES, BlockTile, row_tile

mend()


@triton.jit
def _values(
    x_ptr,
    u_ptr,
    x_offsets,
    u_offsets,
    mask,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
):
    """f(x), or f(x) * u, in fp32."""
    values = act(tl.load(x_ptr + x_offsets, mask, 0.0).to(tl.float32), ACTIVATION, FAST)
    if GATED:
        values *= tl.load(u_ptr + u_offsets, mask, 0.0).to(tl.float32)
    return values


@triton.jit
def _sizes(values):
    """|v| as integers, which have the same order."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(amax, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The bits of the scale, from those of the largest size: `scaled.scale_ref`."""
    largest = 448.0 if FORMAT == "e4m3" else 57344.0
    scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), largest), 1.1754943508222875e-38)
    bits = scale.to(tl.int32, bitcast=True)
    if POWER_OF_TWO:  # the next one above
        bits = (bits + 0x007FFFFF) & 0x7F800000
    bits = tl.where(amax == 0, 0x3F800000, bits)  # 1
    return tl.where(amax < 0x7F800000, bits, 0x7FC00000)  # else infinity or NaN: NaN


@triton.jit
def _store_data(
    words_ptr, t, k, T, scales_at, pitch, values, scale_bits, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """v / scale, or zeros where the scale is NaN, at columns k of rows t."""
    fp8: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
    scale = scale_bits.to(tl.float32, bitcast=True)
    if POWER_OF_TWO:  # whose inverse is exact, so that the product is the quotient
        quotient = values * tl.div_rn(1.0, scale)
    else:
        quotient = tl.div_rn(values, scale)
    data = tl.where(scale == scale, quotient, 0.0).to(fp8)
    # both are multiples of 4, which Triton sees in products; it knows by itself where they are some of 16
    mask = (t < T) & (k < scales_at // 4 * 4)
    tl.store(words_ptr.to(tl.pointer_type(fp8)) + t * (pitch // 4 * 4) + k, data, mask)


@triton.jit
def _store_scale(words_ptr, t, in_rows, scales_at, pitch, scale_bits):
    """The one scale of each row, and the zeros behind it."""
    first = scales_at // 4
    i = tl.arange(0, 32)  # to the end of a line, at most
    words = tl.where(i[None, :] == 0, scale_bits[:, None], 0)
    mask = in_rows[:, None] & (first + i < pitch // 4)[None, :]
    tl.store(words_ptr + t[:, None] * (pitch // 4) + first + i[None, :], words, mask)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # (T, K)
    u_ptr,  # (T, K), unread unless GATED
    words_ptr,  # (T, pitch / 4) contiguous, int32
    T,
    K,
    stride_xt,
    stride_xk,
    stride_ut,
    stride_uk,
    scales_at,  # the byte of a row of words at which its scales begin: K, rounded up to words
    pitch,  # bytes of a row of words
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    HELD: tl.constexpr,  # rows: BLOCK_COLS is K at least
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program holds BLOCK_ROWS rows, or reads them twice: for their scales, and back to write them."""
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if HELD:
        k = tl.arange(0, BLOCK_COLS).to(tl.int64)
        in_rows = t < T
        mask = in_rows[:, None] & (k < K)[None, :]
        x_offsets = t[:, None] * stride_xt + k[None, :] * stride_xk
        u_offsets = t[:, None] * stride_ut + k[None, :] * stride_uk
        values = _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION, GATED, FAST)
        scale = _scale_of(tl.max(_sizes(values), axis=1), FORMAT, POWER_OF_TWO)
        _store_data(
            *(words_ptr, t[:, None], k[None, :], T, scales_at, pitch, values, scale[:, None]),
            *(FORMAT, POWER_OF_TWO),
        )
    else:
        in_rows = t < T
        x_rows, u_rows = t[:, None] * stride_xt, t[:, None] * stride_ut
        largest = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.int32)
        for start in tl.range(0, K, BLOCK_COLS, num_stages=3):
            k = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = in_rows[:, None] & (k < K)[None, :]
            x_offsets, u_offsets = x_rows + k[None, :] * stride_xk, u_rows + k[None, :] * stride_uk
            values = _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION, GATED, FAST)
            largest = tl.maximum(largest, _sizes(values))
        scale = _scale_of(tl.max(largest, axis=1), FORMAT, POWER_OF_TWO)
        blocks = tl.cdiv(K, BLOCK_COLS)
        for done in tl.range(0, blocks, num_stages=3):
            k = ((blocks - 1 - done) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = in_rows[:, None] & (k < K)[None, :]
            x_offsets, u_offsets = x_rows + k[None, :] * stride_xk, u_rows + k[None, :] * stride_uk
            values = _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION, GATED, FAST)
            _store_data(
                *(words_ptr, t[:, None], k[None, :], T, scales_at, pitch, values, scale[:, None]),
                *(FORMAT, POWER_OF_TWO),
            )
    _store_scale(words_ptr, t, in_rows, scales_at, pitch, scale)


@triton.jit
def _quantize_blocks_kernel(
    x_ptr,  # (T, K)
    u_ptr,  # (T, K), unread unless GATED
    words_ptr,  # (T, pitch / 4) contiguous, int32
    T,
    K,
    stride_xt,
    stride_xk,
    stride_ut,
    stride_uk,
    scales_at,  # the byte of a row of words at which its scales begin: K, rounded up to words
    pitch,  # bytes of a row of words
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,  # elements that share a scale
    BLOCK_ROWS: tl.constexpr,  # BLOCK, if SQUARE
    GROUPS: tl.constexpr,
):
    """One program takes BLOCK_ROWS rows of GROUPS scales."""
    scales = tl.cdiv(K, BLOCK)
    col_tiles = tl.cdiv(scales, GROUPS)
    col_tile = tl.program_id(0) % col_tiles
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = (tl.program_id(0) // col_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    s = col_tile * GROUPS + tl.arange(0, GROUPS)
    k = (s[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64)[None, :, :]
    rows, in_rows = t[:, None, None], (t < T)[:, None, None]
    x_offsets, u_offsets = rows * stride_xt + k * stride_xk, rows * stride_ut + k * stride_uk
    values = _values(x_ptr, u_ptr, x_offsets, u_offsets, in_rows & (k < K), ACTIVATION, GATED, FAST)
    largest = tl.max(_sizes(values), axis=2)
    if SQUARE:
        largest = tl.broadcast_to(tl.max(largest, axis=0)[None, :], (BLOCK_ROWS, GROUPS))
    scale = _scale_of(largest, FORMAT, POWER_OF_TWO)
    if POWER_OF_TWO:  # `scaled.LARGEST_BACK`
        bound = 3.190147189883798e38 if FORMAT == "e4m3" else 2.9774707105582116e38
        values = tl.minimum(tl.maximum(values, -bound), bound)
    _store_data(words_ptr, rows, k, T, scales_at, pitch, values, scale[:, :, None], FORMAT, POWER_OF_TWO)

    first_scale = words_ptr + t[:, None] * (pitch // 4) + scales_at // 4
    tl.store(first_scale + s[None, :], scale, (t < T)[:, None] & (s < scales)[None, :])
    if col_tile == col_tiles - 1:
        i = scales + tl.arange(0, 32)[None, :]  # to the end of a line, at most
        mask = (t < T)[:, None] & (scales_at // 4 + i < pitch // 4)
        tl.store(first_scale + i, tl.zeros((BLOCK_ROWS, 32), tl.int32), mask)


_COLUMNS = BlockTile(32, 128, num_warps=8)  # of x that lies by columns: 64 bytes of each
_LONG_ROWS = BlockTile(1, 4096, num_warps=8)
_BLOCKS = BlockTile(8, 8 * BLOCK, num_warps=8)  # a row's scales fill a sector
_BLOCKS_BY_COLUMNS = BlockTile(32, BLOCK, num_warps=8)
_SQUARES = BlockTile(BLOCK, BLOCK, num_warps=16, chunk=BLOCK)


@planned
def quantize(
    x: Tensor,
    u: Tensor | None = None,
    *,
    activation: Activation = "none",
    format: Format,
    scaling: Scaling,
    power_of_two: bool = False,
    square: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of f(x), or of f(x) * u, in fp8, each with its scales: words, see `scaled`.

    What is between is computed in fp32 and never written. Words of x itself are those of
    `scaled.quantize_ref`, bit for bit.

    x, u: (rows, columns), of any strides
    square: one scale for each 128 x 128, not for each 128 of a row
    out: where the words are written; rows of a larger matrix, say
    """
    launcher = "quantize"
    require_activation(launcher, activation)
    require_matrices(launcher, ("x", x), ("u", u))
    if u is not None and u.shape != x.shape:
        raise ValueError(f"{launcher}: expected u of the shape of x {tuple(x.shape)}, got {tuple(u.shape)}")
    _require_words(launcher, "format", format, Format)
    _require_words(launcher, "scaling", scaling, Scaling)
    require_fp8(launcher, target_of(x.device))
    T, K = x.shape
    shape = T, words_of(K, scaling)
    if out is None:  # made as fp32, of which tests see what was not written
        words = launch.empty(shape, torch.float32, x.device).view(torch.int32)
    else:
        inputs = (("x", x), ("u", u))
        (words,) = launch.results(launcher, out, {"words": shape}, inputs, dtype=torch.int32)
    if not words.numel():
        return words
    by_columns = x.stride(0) == 1 != x.stride(1)
    constants: dict[str, Any]
    if scaling == "blocks":
        kernel, tile = _quantize_blocks_kernel, _SQUARES if square else _BLOCKS
        tile = _BLOCKS_BY_COLUMNS if by_columns and not square else tile
        programs = launch.ceil_div(T, tile.block_rows) * launch.ceil_div(K, tile.block_cols)
        constants = {"SQUARE": square, "BLOCK": BLOCK, "GROUPS": tile.block_cols // BLOCK}
    else:
        kernel, held = _quantize_rows_kernel, not by_columns and K <= MAX_FEATURES
        tile = row_tile(launcher, max(K, 1)) if held else _COLUMNS if by_columns else _LONG_ROWS
        programs = launch.ceil_div(T, tile.block_rows)
        constants = {"HELD": held, "BLOCK_COLS": tile.block_cols}
    second = x if u is None else u
    launch.on(x.device, kernel, (programs,))(
        x,
        second,
        words,
        T,
        K,
        *x.stride(),
        *second.stride(),
        4 * launch.ceil_div(K, 4),
        4 * words.shape[1],
        FORMAT=format,
        POWER_OF_TWO=power_of_two,
        ACTIVATION=activation,
        GATED=u is not None,
        FAST=fast_math(x.dtype, target_of(x.device)),
        BLOCK_ROWS=tile.block_rows,
        num_warps=tile.num_warps,
        **constants,
    )
    return words


def _require_words(launcher: str, name: str, word: str, kinds: Any) -> None:
    if word not in get_args(kinds):
        expected = " or ".join(map(repr, get_args(kinds)))
        raise ValueError(f"{launcher}: expected {name} {expected}, got {word!r}")
