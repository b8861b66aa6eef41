"""Input gradient of a linear layer, with the activation below undone in the epilogue. Oracles: `reference`.

T tokens, N out_features, K in_features; z (T, K) is the pre-activation of the layer below, if there is one:

    dx = dy w                 (T, K)    `dgrad`
    dx = dy w + dy2 w2        (T, K)    of an x that two layers share: one accumulator, rounded once
    dz = (dy w) * f'(z)       (T, K)    `dgrad_act`: the gradient of the layer below's product
    db = Σ over tokens of dz  (K,)      its bias gradient, of the fp32 dz; on request

For db each tile leaves the sum over its rows in a row of a small fp32 matrix.
`sum_partials` sums them: one writer an element and a fixed order, so the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.bias_grad import sum_partials
from tpkernels.kernels.blocks import add_products, load_block, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act_and_grad
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, require_matrices, require_shape
from tpkernels.kernels.tiles import MatmulTile, without_spills
from tpkernels.kernels.waits import Arrivals, Wait, arrived


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
    dy2=None,  # (T, M), of the second pair; None: there is none
    w2=None,  # (M, K)
    M=None,
    stride_dy2t=None,
    stride_dy2m=None,
    stride_w2m=None,
    stride_w2k=None,
    flags_ptr=None,  # the rest as `waits.arrived` takes it; None: dy is here
    awaited_ptr=None,
    status_ptr=None,
    first_tile=None,
    chunk_rows=None,
    spin_limit=None,
    ASYNC_PROXY: tl.constexpr = None,
):
    """Each program computes every num_programs-th tile of dx."""
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(T, BLOCK_ROWS)
    col_tiles = tl.cdiv(K, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row_tile = arrived(
            *(row_tile, row_tiles, T, flags_ptr, awaited_ptr, status_ptr, first_tile, chunk_rows),
            *(spin_limit, BLOCK_ROWS, FLATTEN, ASYNC_PROXY),
        )
        t = row_tile * BLOCK_ROWS
        k = col_tile * BLOCK_COLS
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        acc = add_products(
            *(acc, dy, w, t, k, T, K, N, stride_dyt, stride_dyn, stride_wk, stride_wn),
            *(True, PRECISION, BLOCK_DEPTH, TMA),
        )
        if dy2 is not None:
            acc = add_products(
                *(acc, dy2, w2, t, k, T, K, M, stride_dy2t, stride_dy2m, stride_w2k, stride_w2m),
                *(True, PRECISION, BLOCK_DEPTH, TMA),
            )
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


_SECOND = ("dy2", "w2", "M", "stride_dy2t", "stride_dy2m", "stride_w2m", "stride_w2k")  # of the kernel


class DgradAct(NamedTuple):
    """What `dgrad_act` returns."""

    dz: Tensor  # (tokens, in_features)
    db: Tensor | None  # (in_features,) in fp32, if it was asked for


@planned
def dgrad(
    dy: Tensor,
    weight: Tensor,
    dy2: Tensor | None = None,
    weight2: Tensor | None = None,
    *,
    out: launch.Out = None,
    arrivals: Arrivals | None = None,
    first_row: int = 0,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> Tensor:
    """dy weight, the gradient of x in `x weightᵀ`, in the dtype of dy; plus dy2 weight2, if they are given.

    dy, dy2: (tokens, out_features), each of its weight
    weight, weight2: (out_features, in_features)
    out: where the result is written; rows of a larger matrix, say. It may be in fp32
    arrivals: of the chunks of dy, and of dy2, each of which is read once its flag is up; None: all is here
    first_row, margin: as of `waits.Wait`
    returns: (tokens, in_features)
    """
    wait = Wait(arrivals, first_row, margin)
    return _dgrad("dgrad", (dy, weight, dy2, weight2), None, "none", False, out, wait, tile, form).dz


@planned
def dgrad_act(
    dy: Tensor,
    weight: Tensor,
    z: Tensor,
    activation: Activation,
    *,
    bias_grad: bool = False,
    out: launch.Out = None,
    arrivals: Arrivals | None = None,
    first_row: int = 0,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> DgradAct:
    """The gradient of z in `act(z) weightᵀ`, and on request its sum over tokens.

    dy: (tokens, out_features)
    weight: (out_features, in_features)
    z: (tokens, in_features)
    out: where dz is written (rows of a larger matrix, say), and db, if it is asked for
    arrivals, first_row, margin: of dy, as in `dgrad`
    """
    wait = Wait(arrivals, first_row, margin)
    pair = dy, weight, None, None
    return _dgrad("dgrad_act", pair, z, activation, bias_grad, out, wait, tile, form)


def _dgrad(
    launcher: str,
    pairs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    z: Tensor | None,
    activation: Activation,
    bias_grad: bool,
    out: launch.Out,
    wait: Wait,
    tile: MatmulTile | None,
    form: Form | None,
) -> DgradAct:
    dy, weight, dy2, weight2 = pairs
    operands = (("dy", dy), ("weight", weight), ("dy2", dy2), ("weight2", weight2), ("z", z))
    require_matrices(launcher, *operands)
    require_activation(launcher, activation)
    (T, N), K = dy.shape, weight.shape[1]
    require_shape(launcher, "weight", weight, (N, K), f"(out_features, in_features) for dy {tuple(dy.shape)}")
    require_shape(launcher, "z", z, (T, K), "(tokens, in_features) of dy and weight")
    if dy2 is not None and weight2 is not None:
        M = dy2.shape[1]
        require_shape(launcher, "dy2", dy2, (T, M), "(tokens of dy, out_features)")
        require_shape(launcher, "weight2", weight2, (M, K), "(out_features of dy2, in_features of weight)")
    elif dy2 is not None or weight2 is not None:
        raise ValueError(f"{launcher}: expected dy2 and weight2, or neither, got one of them")
    wanted: dict[str, tuple[int, ...]] = {"dx" if z is None else "dz": (T, K)}
    wanted |= {"db": (K,)} if bias_grad else {}
    dx, *db = launch.results(launcher, out, wanted, operands, sums=z is None)
    given = tuple((name, matrix) for name, matrix in operands if matrix is not None)
    product = launch.product(launcher, "dgrad", (*given, ("the result", dx)), (T, K), tile, form, wait)
    second: dict[str, Any] = {}
    if dy2 is not None and weight2 is not None:
        product = product._replace(tile=without_spills("dgrad_pairs", product.tile))
        blocks = product.block(dy2, "rows", "depth"), product.block(weight2, "depth", "cols")
        values = (*blocks, dy2.shape[1], *dy2.stride(), *weight2.stride())
        second = dict(zip(_SECOND, values, strict=True))
    z = dx if z is None else z  # unread: there is no activation then
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
            **second,
        )
    return DgradAct(dx, sum_partials(partials, out=db[0]) if bias_grad else None)
