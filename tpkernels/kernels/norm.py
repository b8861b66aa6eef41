"""RMSNorm and LayerNorm of each token, forward and backward. Oracles: `reference`.

T tokens, K features; sums over the features of a token, in fp32:

    mean = Σ x / K                                 (T,)      LayerNorm; 0 for RMSNorm
    rstd = 1 / sqrt(Σ (x - mean)² / K + eps)       (T,)
    n    = (x - mean) * rstd                       (T, K)    never written
    y    = n * weight + bias                       (T, K)

    dn      = dy * weight                          (T, K)    never written
    dx      = rstd * (dn - n * Σ (dn * n) / K - Σ dn / K)    (T, K)    Σ dn only for LayerNorm
    dweight = Σ over tokens of dy * n              (K,)      fp32
    dbias   = Σ over tokens of dy                  (K,)      fp32, LayerNorm

A program holds full rows, so x is read once and the variance is that of centred values. Where x is the sum of
slots and a residual, `reduce.add_norm` writes it and its norm in one pass, and the backward adds the gradient
that x has as the next residual, `plus`, to dx. The backward is
deterministic: each program sums dweight over a fixed number of tokens, and `sum_partials` adds those up;
dbias is left to `bias_grad`, as a second accumulator would not fit with rows of 16k features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.bias_grad import bias_grad, sum_partials
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import require_matrices, require_parameter, require_shape, require_statistic
from tpkernels.kernels.target import target_of
from tpkernels.kernels.tiles import MAX_PLUS_FEATURES, BlockTile, row_tile

mend()


@triton.jit
def _norm_fwd_kernel(
    x_ptr,  # (T, K)
    weight_ptr,  # (K,)
    bias_ptr,  # (K,), unread unless HAS_BIAS
    y_ptr,  # (T, K) contiguous
    mean_ptr,  # (T,), untouched unless CENTRE
    rstd_ptr,  # (T,)
    T,
    K,
    stride_xt,
    stride_xk,
    stride_wk,
    stride_bk,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # at least K
):
    """One program normalises BLOCK_ROWS tokens."""
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_COLS).to(tl.int64)
    in_rows = t < T
    mask = in_rows[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + t[:, None] * stride_xt + k[None, :] * stride_xk, mask, 0.0).to(tl.float32)
    if CENTRE:
        mean = tl.sum(x, axis=1) / K
        tl.store(mean_ptr + t, mean, in_rows)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / K + eps)
    tl.store(rstd_ptr + t, rstd, in_rows)
    y = scaled_rows(x, rstd, k, weight_ptr, bias_ptr, K, stride_wk, stride_bk, HAS_BIAS)
    tl.store(y_ptr + t[:, None] * K + k[None, :], y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def scaled_rows(x, rstd, k, weight_ptr, bias_ptr, K, stride_wk, stride_bk, HAS_BIAS: tl.constexpr):
    """The norm of rows that are centred. k: the features of their columns"""
    weight = tl.load(weight_ptr + k * stride_wk, k < K, 0.0).to(tl.float32)
    y = x * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + k * stride_bk, k < K, 0.0).to(tl.float32)[None, :]
    return y


class NormForward(NamedTuple):
    """What the norms return."""

    y: Tensor  # (tokens, features)
    mean: Tensor | None  # (tokens,) in fp32; RMSNorm has none
    rstd: Tensor  # (tokens,) in fp32


@planned
def rms_norm_fwd(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    tile: BlockTile | None = None,
) -> NormForward:
    """x / rms(x) * weight, in the dtype of x.

    x: (tokens, features)
    weight: (features,), in the dtype of x or fp32
    """
    return _norm_fwd("rms_norm_fwd", x, weight, None, eps, False, tile)


@planned
def layer_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    tile: BlockTile | None = None,
) -> NormForward:
    """x, centred and scaled to unit variance, times weight plus bias, in the dtype of x.

    x: (tokens, features)
    weight, bias: (features,), in the dtype of x or fp32
    """
    return _norm_fwd("layer_norm_fwd", x, weight, bias, eps, True, tile)


def _norm_fwd(
    launcher: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    tile: BlockTile | None,
) -> NormForward:
    require_matrices(launcher, ("x", x))
    require_parameter(launcher, "weight", weight, x)
    if bias is not None:
        require_parameter(launcher, "bias", bias, x)
    T, K = x.shape
    tile = tile or row_tile(launcher, K)
    target_of(x.device)
    y = launch.empty((T, K), x.dtype, x.device)
    mean = launch.empty((T,), torch.float32, x.device) if centre else None
    rstd = launch.empty((T,), torch.float32, x.device)
    if T:
        launch.on(x.device, _norm_fwd_kernel, (launch.ceil_div(T, tile.block_rows),))(
            x,
            weight,
            weight if bias is None else bias,
            y,
            rstd if mean is None else mean,
            rstd,
            T,
            K,
            *x.stride(),
            weight.stride(0),
            0 if bias is None else bias.stride(0),
            eps,
            CENTRE=centre,
            HAS_BIAS=bias is not None,
            BLOCK_ROWS=tile.block_rows,
            BLOCK_COLS=tile.block_cols,
            num_warps=tile.num_warps,
        )
    return NormForward(y, mean, rstd)


@triton.jit
def _norm_bwd_kernel(
    dy_ptr,  # (T, K)
    x_ptr,  # (T, K)
    weight_ptr,  # (K,)
    mean_ptr,  # (T,), unread unless CENTRE
    rstd_ptr,  # (T,)
    dx_ptr,  # (T, K) contiguous
    dweight_ptr,  # (programs, K) contiguous, fp32
    T,
    K,
    stride_dyt,
    stride_dyk,
    stride_xt,
    stride_xk,
    stride_wk,
    CENTRE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,  # at least K
    plus_ptr=None,  # (T, K), like dx; None: nothing is added to dx
    stride_pt=None,
    stride_pk=None,
):
    """One program takes CHUNK tokens, BLOCK_ROWS at a time."""
    program = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_COLS)
    in_cols = k < K
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for step in range(0, CHUNK, BLOCK_ROWS):
        # int64: T * K passes 2**31 at 512k tokens of width 4096
        t = program * CHUNK + step + tl.arange(0, BLOCK_ROWS)
        in_rows = t < T
        mask = in_rows[:, None] & in_cols[None, :]
        n = tl.load(x_ptr + t[:, None] * stride_xt + k.to(tl.int64)[None, :] * stride_xk, mask, 0.0).to(
            tl.float32
        )
        dy = tl.load(dy_ptr + t[:, None] * stride_dyt + k.to(tl.int64)[None, :] * stride_dyk, mask, 0.0).to(
            tl.float32
        )
        rstd = tl.load(rstd_ptr + t, in_rows, 0.0)
        if CENTRE:
            mean = tl.load(mean_ptr + t, in_rows, 0.0)
            n = tl.where(mask, n - mean[:, None], 0.0)
        n *= rstd[:, None]
        dweight += dy * n
        # read again for each block: held across the loop it would take the registers of a fourth row
        weight = tl.load(weight_ptr + k.to(tl.int64) * stride_wk, in_cols, 0.0).to(tl.float32)
        dn = dy * weight[None, :]
        scale = tl.sum(dn * n, axis=1) / K
        shift = tl.sum(dn, axis=1) / K if CENTRE else tl.zeros((BLOCK_ROWS,), tl.float32)
        dx = (dn - n * scale[:, None] - shift[:, None]) * rstd[:, None]
        if plus_ptr is not None:  # to dx as it would be written: the bits of two passes
            plus = tl.load(
                plus_ptr + t[:, None] * stride_pt + k.to(tl.int64)[None, :] * stride_pk, mask, 0.0
            ).to(tl.float32)
            dx = dx.to(dx_ptr.dtype.element_ty).to(tl.float32) + plus
        tl.store(dx_ptr + t[:, None] * K + k[None, :], dx.to(dx_ptr.dtype.element_ty), mask)
    tl.store(dweight_ptr + program * K + k, tl.sum(dweight, axis=0), in_cols)


class NormBackward(NamedTuple):
    """What the backwards of the norms return."""

    dx: Tensor  # (tokens, features)
    dweight: Tensor  # (features,) in fp32
    dbias: Tensor | None  # (features,) in fp32; RMSNorm has none


@planned
def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    plus: Tensor | None = None,
    *,
    tile: BlockTile | None = None,
) -> NormBackward:
    """The gradients of `rms_norm_fwd`.

    dy, x: (tokens, features)
    weight: (features,)
    rstd: (tokens,), the forward's
    plus: like x, of at most 8,192 features; another gradient of x, which is added to dx
    """
    return _norm_bwd("rms_norm_bwd", dy, x, weight, None, rstd, plus, tile)


@planned
def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    plus: Tensor | None = None,
    *,
    tile: BlockTile | None = None,
) -> NormBackward:
    """The gradients of `layer_norm_fwd`; arguments as in `rms_norm_bwd`.

    mean: (tokens,), the forward's
    """
    return _norm_bwd("layer_norm_bwd", dy, x, weight, mean, rstd, plus, tile)


def _norm_bwd(
    launcher: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    plus: Tensor | None,
    tile: BlockTile | None,
) -> NormBackward:
    require_matrices(launcher, ("dy", dy), ("x", x), ("plus", plus))
    for name, gradient in (("dy", dy), ("plus", plus)):
        require_shape(launcher, name, gradient, tuple(x.shape), "that of x")
    require_parameter(launcher, "weight", weight, x)
    require_statistic(launcher, "rstd", rstd, x)
    if mean is not None:
        require_statistic(launcher, "mean", mean, x)
    T, K = x.shape
    if plus is not None and K > MAX_PLUS_FEATURES:
        raise ValueError(
            f"{launcher}: expected at most {MAX_PLUS_FEATURES} features with plus, got {K}: add it to dx"
        )
    tile = tile or row_tile(launcher, K)
    target_of(x.device)
    programs = max(1, launch.ceil_div(T, tile.chunk))  # no tokens: one program, which leaves zeros
    dx = launch.empty((T, K), x.dtype, x.device)
    dweight = launch.empty((programs, K), torch.float32, x.device)
    launch.on(x.device, _norm_bwd_kernel, (programs,))(
        dy,
        x,
        weight,
        rstd if mean is None else mean,
        rstd,
        dx,
        dweight,
        T,
        K,
        *dy.stride(),
        *x.stride(),
        weight.stride(0),
        mean is not None,
        tile.chunk,
        tile.block_rows,
        tile.block_cols,
        *(() if plus is None else (plus, *plus.stride())),
        num_warps=tile.num_warps,
    )
    return NormBackward(dx, sum_partials(dweight), None if mean is None else bias_grad(dy))
