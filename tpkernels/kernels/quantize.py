"""Rows rounded to fp8 beside their scales, and back: kernels and launchers. Oracles: `scaled.quantize_ref`.

T rows, K columns, S scales a row; `scaled` says how words hold them:

    v      = x, f(x) or f(g) * u                        (T, K)    in fp32, never written
    amax   = max |v| of a row, or of 128 of its elements, or of 128 x 128
    scale  = amax / the format's largest number         (T, S)
    data   = v / scale                                  (T, K)    rounded to fp8, nearest even

The bits are those of the oracle: both divisions are true ones, and sizes are compared as integers, in whose
order NaN is above infinity (a maximum of floating-point numbers drops NaN). With an activation they are those
of the oracle up to its last bits: an element next to the middle of two numbers of fp8 may go to the other one.

x may lie in memory by rows or by columns (`w.t()`), and is read along its memory either way; what is written
is rows. Scales of rows need all of a row first: a program holds rows of up to 16k columns, and reads longer
ones, and columns, twice. The second time goes backwards, as what was read last is still in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, require_activation, require_glu
from tpkernels.kernels.epilogues import act
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.operands import DTYPES, require_matrices
from tpkernels.kernels.recipe import BLOCK, Format, Scaling
from tpkernels.kernels.scaled import DTYPE_OF, words_of
from tpkernels.kernels.target import fast_math, target_of
from tpkernels.kernels.tiles import MAX_FEATURES, row_tile

mend()


@triton.jit
def _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION: tl.constexpr, GATED: tl.constexpr, FAST: tl.constexpr):
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
def _store_data(words_ptr, t, k, pitch, mask, values, scale_bits, FORMAT: tl.constexpr):
    """v / scale, or zeros where the scale is NaN, at columns k of rows t."""
    fp8: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
    scale = scale_bits.to(tl.float32, bitcast=True)
    data = tl.where(scale == scale, tl.div_rn(values, scale), 0.0).to(fp8)
    tl.store(words_ptr.to(tl.pointer_type(fp8)) + t * pitch + k, data, mask)


@triton.jit
def _store_scales(words_ptr, t, in_rows, pitch, K, scale_bits):
    """The one scale of each row, and the zeros behind it."""
    first = tl.cdiv(K, 4)
    i = tl.arange(0, 8)  # to the end of a sector, at most
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
    pitch,  # bytes of a row of words
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # at least K
):
    """One program holds BLOCK_ROWS rows."""
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_COLS).to(tl.int64)
    in_rows = t < T
    mask = in_rows[:, None] & (k < K)[None, :]
    x_offsets = t[:, None] * stride_xt + k[None, :] * stride_xk
    u_offsets = t[:, None] * stride_ut + k[None, :] * stride_uk
    values = _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION, GATED, FAST)
    scale = _scale_of(tl.max(_sizes(values), axis=1), FORMAT, POWER_OF_TWO)
    inside = in_rows[:, None] & (k < 4 * tl.cdiv(K, 4))[None, :]
    _store_data(words_ptr, t[:, None], k[None, :], pitch, inside, values, scale[:, None], FORMAT)
    _store_scales(words_ptr, t, in_rows, pitch, K, scale)


@triton.jit
def _quantize_strips_kernel(
    x_ptr,  # (T, K)
    u_ptr,  # (T, K), unread unless GATED
    words_ptr,  # (T, pitch / 4) contiguous, int32
    T,
    K,
    stride_xt,
    stride_xk,
    stride_ut,
    stride_uk,
    pitch,  # bytes of a row of words
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program goes through BLOCK_ROWS rows twice: for their scales, and back to write them."""
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = t < T
    x_rows, u_rows = t[:, None] * stride_xt, t[:, None] * stride_ut
    largest = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.int32)
    for start in tl.range(0, K, BLOCK_COLS):
        k = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
        mask = in_rows[:, None] & (k < K)[None, :]
        x_offsets, u_offsets = x_rows + k[None, :] * stride_xk, u_rows + k[None, :] * stride_uk
        values = _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION, GATED, FAST)
        largest = tl.maximum(largest, _sizes(values))
    scale = _scale_of(tl.max(largest, axis=1), FORMAT, POWER_OF_TWO)
    blocks = tl.cdiv(K, BLOCK_COLS)
    for done in tl.range(0, blocks):
        k = ((blocks - 1 - done) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
        mask = in_rows[:, None] & (k < K)[None, :]
        x_offsets, u_offsets = x_rows + k[None, :] * stride_xk, u_rows + k[None, :] * stride_uk
        values = _values(x_ptr, u_ptr, x_offsets, u_offsets, mask, ACTIVATION, GATED, FAST)
        inside = in_rows[:, None] & (k < 4 * tl.cdiv(K, 4))[None, :]
        _store_data(words_ptr, t[:, None], k[None, :], pitch, inside, values, scale[:, None], FORMAT)
    _store_scales(words_ptr, t, in_rows, pitch, K, scale)


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
    inside = in_rows & (k < 4 * tl.cdiv(K, 4))
    _store_data(words_ptr, rows, k, pitch, inside, values, scale[:, :, None], FORMAT)

    first_scale = words_ptr + t[:, None] * (pitch // 4) + tl.cdiv(K, 4)
    tl.store(first_scale + s[None, :], scale, (t < T)[:, None] & (s < scales)[None, :])
    if col_tile == col_tiles - 1:
        i = scales + tl.arange(0, 8)[None, :]  # to the end of a sector, at most
        mask = (t < T)[:, None] & (tl.cdiv(K, 4) + i < pitch // 4)
        tl.store(first_scale + i, tl.zeros((BLOCK_ROWS, 8), tl.int32), mask)


@triton.jit
def _dequantize_kernel(
    data_ptr,  # (T, K)
    scale_ptr,  # (T, S)
    y_ptr,  # (T, K) contiguous
    T,
    K,
    stride_dt,
    stride_dk,
    stride_st,
    stride_ss,  # 0: all of a row share one
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program takes BLOCK_ROWS rows of GROUPS times BLOCK columns."""
    scales = tl.cdiv(K, BLOCK)
    col_tiles = tl.cdiv(scales, GROUPS)
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = (tl.program_id(0) // col_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    s = tl.program_id(0) % col_tiles * GROUPS + tl.arange(0, GROUPS)
    k = (s[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64)[None, :, :]
    rows = t[:, None, None]
    mask = (rows < T) & (k < K)
    data = tl.load(data_ptr + rows * stride_dt + k * stride_dk, mask, 0.0).to(tl.float32)
    in_scales = (t < T)[:, None] & (s < scales)[None, :]
    scale = tl.load(scale_ptr + t[:, None] * stride_st + s.to(tl.int64)[None, :] * stride_ss, in_scales, 0.0)
    tl.store(y_ptr + rows * K + k, (data * scale[:, :, None]).to(y_ptr.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a program holds at a time."""

    block_rows: int
    block_cols: int
    num_warps: int


_COLUMNS = _Tile(32, 256, num_warps=8)  # of x that lies by columns: 64 bytes of each
_LONG_ROWS = _Tile(1, 8192, num_warps=8)
_BLOCKS = _Tile(8, 8 * BLOCK, num_warps=8)  # of which a row's scales fill a sector
_BLOCKS_BY_COLUMNS = _Tile(64, BLOCK, num_warps=8)
_SQUARES = _Tile(BLOCK, BLOCK, num_warps=8)


def quantize(
    x: Tensor,
    *,
    format: Format,
    scaling: Scaling,
    power_of_two: bool = False,
    square: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of x in fp8, each with its scales: the words of `scaled.quantize_ref`, bit for bit.

    x: (rows, columns), of any strides
    square: one scale for each 128 x 128, not for each 128 of a row
    out: where the words are written; rows of a larger matrix, say
    """
    return _quantize("quantize", x, None, "none", format, scaling, power_of_two, square, out)


def quantize_act(
    z: Tensor,
    *,
    activation: Activation,
    format: Format,
    scaling: Scaling,
    power_of_two: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`quantize` of f(z), which is computed in fp32 and never written.

    z: (rows, columns), of any strides
    """
    require_activation("quantize_act", activation)
    return _quantize("quantize_act", z, None, activation, format, scaling, power_of_two, False, out)


def quantize_glu(
    g: Tensor,
    u: Tensor,
    *,
    kind: Glu,
    format: Format,
    scaling: Scaling,
    power_of_two: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`quantize` of f(g) * u, f being the activation of `kind`; computed in fp32 and never written.

    g, u: (rows, columns), of any strides
    """
    require_glu("quantize_glu", kind)
    return _quantize("quantize_glu", g, u, GATE_OF[kind], format, scaling, power_of_two, False, out)


def _quantize(
    launcher: str,
    x: Tensor,
    u: Tensor | None,
    activation: Activation,
    format: Format,
    scaling: Scaling,
    power_of_two: bool,
    square: bool,
    out: Tensor | None,
) -> Tensor:
    require_matrices(launcher, ("x", x), ("u", u))
    if u is not None and u.shape != x.shape:
        raise ValueError(
            f"{launcher}: expected u of the shape of g {tuple(x.shape)}, got {tuple(u.shape)}"
        )
    for name, word, kinds in (("format", format, Format), ("scaling", scaling, Scaling)):
        if word not in get_args(kinds):
            words = " or ".join(map(repr, get_args(kinds)))
            raise ValueError(f"{launcher}: expected {name} {words}, got {word!r}")
    target = target_of(x.device)
    T, K = x.shape
    words = _words(launcher, out, (T, words_of(K, scaling)), x.device)
    if not words.numel():
        return words
    by_columns = x.stride(0) == 1 != x.stride(1)
    constants = {
        "FORMAT": format,
        "POWER_OF_TWO": power_of_two,
        "ACTIVATION": activation,
        "GATED": u is not None,
        "FAST": fast_math(x.dtype, target),
    }
    if scaling == "blocks":
        kernel = _quantize_blocks_kernel
        tile = _SQUARES if square else _BLOCKS_BY_COLUMNS if by_columns else _BLOCKS
        programs = launch.ceil_div(T, tile.block_rows) * launch.ceil_div(K, tile.block_cols)
        constants |= {"SQUARE": square, "BLOCK": BLOCK, "GROUPS": tile.block_cols // BLOCK}
    else:
        if by_columns or K > MAX_FEATURES:
            kernel, tile = _quantize_strips_kernel, _COLUMNS if by_columns else _LONG_ROWS
        else:
            held = row_tile(launcher, max(K, 1))
            kernel, tile = _quantize_rows_kernel, _Tile(held.block_rows, held.block_cols, held.num_warps)
        programs = launch.ceil_div(T, tile.block_rows)
        constants["BLOCK_COLS"] = tile.block_cols
    launch.on(x.device, kernel, (programs,))(
        x,
        x if u is None else u,
        words,
        T,
        K,
        *x.stride(),
        *(x if u is None else u).stride(),
        4 * words.shape[1],
        **constants,
        BLOCK_ROWS=tile.block_rows,
        num_warps=tile.num_warps,
    )
    return words


def _words(launcher: str, out: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    if out is None:  # made as fp32, of which tests see what was not written
        return launch.empty(shape, torch.float32, device).view(torch.int32)
    if tuple(out.shape) != shape or out.dtype != torch.int32 or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{launcher}: expected out contiguous, of shape {shape} in torch.int32 on {device}, got "
            f"{tuple(out.shape)} with strides {out.stride()} in {out.dtype} on {out.device}"
        )
    return out


def dequantize(
    data: Tensor, scale: Tensor, *, dtype: str, out: Tensor | None = None
) -> Tensor:
    """data * scale, in fp32, rounded to dtype: "bfloat16", "float16" or "float32".

    data: (rows, columns) of fp8, of any strides
    scale: (rows, 1), or (rows, columns / 128, rounded up); in fp32
    """
    T, K = data.shape
    wanted = getattr(torch, dtype)
    if wanted not in DTYPES:
        raise TypeError(f"dequantize: expected bfloat16, float16 or float32 as dtype, got {dtype}")
    if data.dtype not in DTYPE_OF.values() or scale.dtype != torch.float32:
        raise TypeError(
            f"dequantize: expected data in fp8 and scales in fp32, got {data.dtype} and {scale.dtype}"
        )
    target_of(data.device)
    shapes = (T, 1), (T, launch.ceil_div(K, BLOCK))
    if tuple(scale.shape) not in shapes or scale.device != data.device:
        raise ValueError(
            f"dequantize: expected scale of shape {shapes[0]} or {shapes[1]} for data {tuple(data.shape)}, on "
            f"{data.device}; got {tuple(scale.shape)} on {scale.device}"
        )
    y = launch.empty((T, K), wanted, data.device)
    if y.numel():
        tile = _BLOCKS
        programs = launch.ceil_div(T, tile.block_rows) * launch.ceil_div(K, tile.block_cols)
        launch.on(data.device, _dequantize_kernel, (programs,))(
            data,
            scale,
            y,
            T,
            K,
            *data.stride(),
            scale.stride(0),
            scale.stride(1) if scale.shape[1] > 1 else 0,
            BLOCK=BLOCK,
            BLOCK_ROWS=tile.block_rows,
            GROUPS=tile.block_cols // BLOCK,
            num_warps=tile.num_warps,
        )
    return y
