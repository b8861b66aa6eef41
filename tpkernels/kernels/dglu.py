"""Backward of a gated unit inside the down-projection's input gradient. The oracle is `reference.dglu_ref`.

T tokens, N features of dy, K features of the gated unit, h = f(g) * u:

    dh = dy w              (T, K)    never written
    dg = dh * u * f'(g)    (T, K)
    du = dh * f(g)         (T, K)
    h  = f(g) * u          (T, K)    emitted again on request, for the down-projection's weight gradient,
                                     so that the forward need not keep it
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import GATE_OF, Glu, require_glu
from tpkernels.kernels.blocks import add_products, load_block, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act_and_grad
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, require_matrices, require_shape
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, Wait, arrived


@triton.jit
def _dglu_kernel(
    dy,  # (T, N), like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K)
    g,  # (T, K)
    u,  # (T, K)
    dg,  # (T, K) contiguous
    du,  # (T, K) contiguous
    h,  # (T, K) contiguous, untouched unless EMIT_H
    T,
    N,
    K,
    stride_dyt,
    stride_dyn,
    stride_wn,
    stride_wk,
    stride_gt,
    stride_gk,
    stride_ut,
    stride_uk,
    GATE: tl.constexpr,
    EMIT_H: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
    flags_ptr=None,  # the rest as `waits.arrived` takes it; None: dy is here
    awaited_ptr=None,
    status_ptr=None,
    first_tile=None,
    chunk_rows=None,
    spin_limit=None,
    ASYNC_PROXY: tl.constexpr = None,
):
    """Each program computes every num_programs-th tile of dg, du and h."""
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
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            k_part = k + p * PART
            dh = parts[p]
            g_part = load_block(g, t, k_part, T, K, stride_gt, stride_gk, BLOCK_ROWS, PART, TMA)
            gate, slope = act_and_grad(g_part.to(tl.float32), GATE, FAST)
            store_block(du, dh * gate, t, k_part, T, K, K, 1, TMA)
            up = load_block(u, t, k_part, T, K, stride_ut, stride_uk, BLOCK_ROWS, PART, TMA).to(tl.float32)
            store_block(dg, dh * up * slope, t, k_part, T, K, K, 1, TMA)
            if EMIT_H:
                store_block(h, gate * up, t, k_part, T, K, K, 1, TMA)


class DgluGrads(NamedTuple):
    """What `dglu` returns, each (tokens, in_features)."""

    dg: Tensor
    du: Tensor
    h: Tensor | None  # if it was asked for


@planned
def dglu(
    dy: Tensor,
    weight: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    kind: Glu = "swiglu",
    emit_h: bool = False,
    out: launch.Out = None,
    arrivals: Arrivals | None = None,
    first_row: int = 0,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> DgluGrads:
    """The gradients of g and u in `(f(g) * u) weightᵀ`, f being the activation of `kind`.

    dy: (tokens, out_features)
    weight: (out_features, in_features), of the down-projection
    g, u: (tokens, in_features)
    out: where dg and du are written, and h if it is emitted; rows of larger matrices, say
    arrivals: of the chunks of dy, each of which is read once its flag is up; None: all is here
    first_row, margin: as of `waits.Wait`
    """
    require_matrices("dglu", ("dy", dy), ("weight", weight), ("g", g), ("u", u))
    require_glu("dglu", kind)
    (T, N), K = dy.shape, weight.shape[1]
    require_shape("dglu", "weight", weight, (N, K), f"(out_features, in_features) for dy {tuple(dy.shape)}")
    for name, tensor in (("g", g), ("u", u)):
        require_shape("dglu", name, tensor, (T, K), "(tokens, in_features) of dy and weight")
    inputs = (("dy", dy), ("weight", weight), ("g", g), ("u", u))
    wanted = dict.fromkeys(("dg", "du", "h") if emit_h else ("dg", "du"), (T, K))
    written = launch.results("dglu", out, wanted, inputs)
    dg, du, h = written if emit_h else (*written, written[0])
    matrices = (*inputs, ("dg", dg), ("du", du), ("h", h))
    wait = Wait(arrivals, first_row, margin)
    product = launch.product("dglu", "dglu", matrices, (T, K), tile, form, wait)
    if dg.numel():
        product.start(_dglu_kernel)(
            product.block(dy, "rows", "depth"),
            product.block(weight, "depth", "cols"),
            product.block(g, "rows", "part"),
            product.block(u, "rows", "part"),
            product.block(dg, "rows", "part"),
            product.block(du, "rows", "part"),
            product.block(h, "rows", "part"),
            T,
            N,
            K,
            *dy.stride(),
            *weight.stride(),
            *g.stride(),
            *u.stride(),
            GATE=GATE_OF[kind],
            EMIT_H=emit_h,
            FAST=product.fast,
            PRECISION=product.precision,
        )
    return DgluGrads(dg, du, h if emit_h else None)
