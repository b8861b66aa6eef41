"""Gated unit in one pass, `h = f(x wgᵀ) * (x wuᵀ)`: kernel and launcher. The oracle is `reference.glu_ref`.

T tokens, K in_features, N out_features of each half:

    g = x wgᵀ       (T, N)    two accumulators share each block of x; the weights stay two tensors,
    u = x wuᵀ       (T, N)    so that each is a correct shard of its own
    h = f(g) * u    (T, N)    of the fp32 g and u
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import GATE_OF, Glu, require_glu
from tpkernels.kernels.blocks import load_block, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, require_matrices, require_shape
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, Wait, arrived


@triton.jit
def _glu_fwd_kernel(
    x,  # (T, K), like every matrix here a tensor descriptor if TMA, else a pointer
    w_gate,  # (N, K)
    w_up,  # (N, K)
    g,  # (T, N) contiguous, untouched unless KEEP
    u,  # (T, N) contiguous, untouched unless KEEP
    h,  # (T, N) contiguous
    T,
    N,
    K,
    stride_xt,
    stride_xk,
    stride_gn,
    stride_gk,
    stride_un,
    stride_uk,
    GATE: tl.constexpr,
    KEEP: tl.constexpr,
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
    """Each program computes every num_programs-th tile of h."""
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
        g_acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        u_acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for k in range(0, K, BLOCK_DEPTH):
            x_block = load_block(x, t, k, T, K, stride_xt, stride_xk, BLOCK_ROWS, BLOCK_DEPTH, TMA)
            gate = load_block(w_gate, n, k, N, K, stride_gn, stride_gk, BLOCK_COLS, BLOCK_DEPTH, TMA)
            g_acc = tl.dot(x_block, gate.T, g_acc, input_precision=PRECISION)
            up = load_block(w_up, n, k, N, K, stride_un, stride_uk, BLOCK_COLS, BLOCK_DEPTH, TMA)
            u_acc = tl.dot(x_block, up.T, u_acc, input_precision=PRECISION)
        g_parts = split_columns(g_acc, PARTS)
        u_parts = split_columns(u_acc, PARTS)
        for p in tl.static_range(PARTS):
            n_part = n + p * PART
            if KEEP:
                store_block(g, g_parts[p], t, n_part, T, N, N, 1, TMA)
                store_block(u, u_parts[p], t, n_part, T, N, N, 1, TMA)
            store_block(h, act(g_parts[p], GATE, FAST) * u_parts[p], t, n_part, T, N, N, 1, TMA)


class GluForward(NamedTuple):
    """What `glu_fwd` returns, each (tokens, out_features)."""

    h: Tensor
    g: Tensor | None  # the two pre-activations, if they were asked for
    u: Tensor | None


@planned
def glu_fwd(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    *,
    kind: Glu = "swiglu",
    keep_gu: bool = False,
    out: launch.Out = None,
    arrivals: Arrivals | None = None,
    first_row: int = 0,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> GluForward:
    """f(x w_gateᵀ) * (x w_upᵀ) in the dtype of x, f being the activation of `kind`.

    x: (tokens, in_features)
    w_gate, w_up: (out_features, in_features)
    out: where h is written, and g and u if they are kept; rows of larger matrices, say
    arrivals: of the chunks of x, each of which is read once its flag is up; None: all is here
    first_row, margin: as of `waits.Wait`
    """
    require_matrices("glu_fwd", ("x", x), ("w_gate", w_gate), ("w_up", w_up))
    require_glu("glu_fwd", kind)
    (T, K), N = x.shape, w_gate.shape[0]
    require_shape("glu_fwd", "w_gate", w_gate, (N, K), f"(out_features, in_features) for x {tuple(x.shape)}")
    require_shape("glu_fwd", "w_up", w_up, (N, K), "that of w_gate")
    inputs = (("x", x), ("w_gate", w_gate), ("w_up", w_up))
    wanted = dict.fromkeys(("h", "g", "u") if keep_gu else ("h",), (T, N))
    written = launch.results("glu_fwd", out, wanted, inputs)
    h, g, u = written if keep_gu else written * 3
    matrices = (*inputs, ("h", h), ("g", g), ("u", u))
    wait = Wait(arrivals, first_row, margin)
    product = launch.product("glu_fwd", "glu", matrices, (T, N), tile, form, wait)
    if h.numel():
        product.start(_glu_fwd_kernel)(
            product.block(x, "rows", "depth"),
            product.block(w_gate, "cols", "depth"),
            product.block(w_up, "cols", "depth"),
            product.block(g, "rows", "part"),
            product.block(u, "rows", "part"),
            product.block(h, "rows", "part"),
            T,
            N,
            K,
            *x.stride(),
            *w_gate.stride(),
            *w_up.stride(),
            GATE=GATE_OF[kind],
            KEEP=keep_gu,
            FAST=product.fast,
            PRECISION=product.precision,
        )
    return GluForward(h, g if keep_gu else None, u if keep_gu else None)
