"""Input gradient of a linear layer, with the activation below undone in the epilogue. Oracles: `reference`.

T tokens, N out_features, K in_features; z (T, K) is the pre-activation of the layer below, if there is one:

    dx = dy w                 (T, K)    `dgrad`
    dz = (dy w) * f'(z)       (T, K)    `dgrad_act`: the gradient of the layer below's product
    db = Σ over tokens of dz  (K,)      its bias gradient, of the fp32 dz; on request

For db each tile leaves the sum over its rows in a row of a small fp32 matrix.
`sum_partials` sums them: one writer an element and a fixed order, so the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.bias_grad import sum_partials
from tpkernels.kernels.blocks import load_block, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act_and_grad
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, require_matrices, require_shape
from tpkernels.kernels.tiles import MatmulTile


@triton.jit
def _dgrad_kernel(
    dy,  # (T, N), like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K)
    z,  # (T, K), unread if there is no ACTIVATION
    dx,  # (T, K) contiguous
    partials_ptr,  # (row_tiles, K) contiguous, always a pointer; untouched unless BIAS_GRAD
    T,
    N,
    K,
    stride_dyt,
    stride_dyn,
    stride_wn,
    stride_wk,
    stride_zt,
    stride_zk,
    ACTIVATION: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FAST: tl.constexpr,
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
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            k_part = k + p * PART
            value = parts[p]
            if ACTIVATION != "none":
                z_part = load_block(z, t, k_part, T, K, stride_zt, stride_zk, BLOCK_ROWS, PART, TMA)
                _, slope = act_and_grad(z_part.to(tl.float32), ACTIVATION, FAST)
                value *= slope
            if BIAS_GRAD:
                # rows past T are 0 * w, which is NaN where w is infinite
                in_rows = t + tl.arange(0, BLOCK_ROWS) < T
                sums = tl.sum(tl.where(in_rows[:, None], value, 0.0), axis=0)
                columns = k_part + tl.arange(0, PART)
                tl.store(partials_ptr + row_tile.to(tl.int64) * K + columns, sums, columns < K)
            store_block(dx, value, t, k_part, T, K, K, 1, TMA)


class DgradAct(NamedTuple):
    """What `dgrad_act` returns."""

    dz: Tensor  # (tokens, in_features)
    db: Tensor | None  # (in_features,) in fp32, if it was asked for


@planned
def dgrad(
    dy: Tensor,
    weight: Tensor,
    *,
    out: launch.Out = None,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> Tensor:
    """dy weight, the gradient of x in `x weightᵀ`, in the dtype of dy.

    dy: (tokens, out_features)
    weight: (out_features, in_features)
    out: where the result is written; rows of a larger matrix, say. It may be in fp32
    returns: (tokens, in_features)
    """
    return _dgrad("dgrad", dy, weight, None, "none", False, out, tile, form).dz


@planned
def dgrad_act(
    dy: Tensor,
    weight: Tensor,
    z: Tensor,
    activation: Activation,
    *,
    bias_grad: bool = False,
    out: launch.Out = None,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> DgradAct:
    """The gradient of z in `act(z) weightᵀ`, and on request its sum over tokens.

    dy: (tokens, out_features)
    weight: (out_features, in_features)
    z: (tokens, in_features)
    out: where dz is written (rows of a larger matrix, say), and db, if it is asked for
    """
    return _dgrad("dgrad_act", dy, weight, z, activation, bias_grad, out, tile, form)


def _dgrad(
    launcher: str,
    dy: Tensor,
    weight: Tensor,
    z: Tensor | None,
    activation: Activation,
    bias_grad: bool,
    out: launch.Out,
    tile: MatmulTile | None,
    form: Form | None,
) -> DgradAct:
    require_matrices(launcher, ("dy", dy), ("weight", weight), ("z", z))
    require_activation(launcher, activation)
    (T, N), K = dy.shape, weight.shape[1]
    require_shape(launcher, "weight", weight, (N, K), f"(out_features, in_features) for dy {tuple(dy.shape)}")
    require_shape(launcher, "z", z, (T, K), "(tokens, in_features) of dy and weight")
    wanted: dict[str, tuple[int, ...]] = {"dx" if z is None else "dz": (T, K)}
    wanted |= {"db": (K,)} if bias_grad else {}
    inputs = (("dy", dy), ("weight", weight), ("z", z))
    dx, *db = launch.results(launcher, out, wanted, inputs, sums=z is None)
    z = dx if z is None else z  # unread: there is no activation then
    matrices = (("dy", dy), ("weight", weight), ("z", z), ("the result", dx))
    product = launch.product(launcher, "dgrad", matrices, (T, K), tile, form)
    partials = dx
    if bias_grad:
        rows = launch.ceil_div(T, product.tile.block_rows)
        partials = launch.empty((rows, K), torch.float32, dy.device)
    if dx.numel():
        product.start(_dgrad_kernel)(
            product.block(dy, "rows", "depth"),
            product.block(weight, "depth", "cols"),
            product.block(z, "rows", "part"),
            product.block(dx, "rows", "part"),
            partials,
            T,
            N,
            K,
            *dy.stride(),
            *weight.stride(),
            *z.stride(),
            ACTIVATION=activation,
            BIAS_GRAD=bias_grad,
            FAST=product.fast,
            PRECISION=product.precision,
        )
    return DgradAct(dx, sum_partials(partials, out=db[0]) if bias_grad else None)
