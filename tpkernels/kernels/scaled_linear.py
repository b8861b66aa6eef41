"""Fused `y = act(x̂ ŵᵀ + b)` of matrices in fp8: kernel and launcher. The oracle is `dispatch.scaled`'s.

T tokens, K in_features, N out_features, S scales a row (one, or one for each 128 of K), see `scaled`:

    rows     z = (x wᵀ) x_scale w_scaleᵀ + b                     (T, N)
    blocks   z = Σ_s (x_s w_sᵀ) x_scale[:, s] w_scale[:, s]ᵀ + b    of 128 of depth each
    y = act(z)                                                   (T, N)    of the fp32 z

Tensor cores add products of fp8 with some 14 bits only, so what they add is promoted: 128 of depth at most
are summed there, then added to a sum in fp32. With fast accumulation they sum all of the depth; scales of
blocks are promoted nevertheless, as each 128 of depth have their own.

Sums on their way to others need registers, too. Where a tile has no more of them, its columns are promoted in
turns: one part is multiplied and added, then the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.blocks import load_block, load_vector, split_columns, store_block, tile_at
from tpkernels.kernels.epilogues import act, halves
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.linear import LinearForward
from tpkernels.kernels.operands import Form, require_scaled, require_shape, require_tensors
from tpkernels.kernels.recipe import BLOCK
from tpkernels.kernels.target import fast_math, require_fp8, target_of
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, Wait, arrived

RESULTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@triton.jit
def _scaled_linear_kernel(
    x,  # (T, K) of fp8, like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K) of fp8
    x_scale_ptr,  # (T, S) fp32
    w_scale_ptr,  # (N, S) fp32, or a row for each SHARED rows of w
    b_ptr,  # (N,), unread unless HAS_BIAS
    z,  # (T, N) contiguous, untouched unless KEEP_Z
    y,  # (T, N) contiguous
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
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_Z: tl.constexpr,
    FAST: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PROMOTE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TURNS: tl.constexpr,  # in which columns are promoted, whose blocks of w are loaded one by one
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
    TURN: tl.constexpr = BLOCK_COLS // TURNS
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
        sums = _zeros(BLOCK_ROWS, TURN, TURNS)
        for k in range(0, K, BLOCK_DEPTH):
            x_block = load_block(x, t, k, T, K, stride_xt, 1, BLOCK_ROWS, BLOCK_DEPTH, TMA)
            for turn in tl.static_range(TURNS):
                acc = sums[0]
                n_turn = n + turn * TURN
                w_block = load_block(w, n_turn, k, N, K, stride_wn, 1, TURN, BLOCK_DEPTH, TMA)
                if BY_BLOCK:
                    products = tl.dot(x_block, w_block.T, max_num_imprecise_acc=BLOCK_DEPTH)
                    s = tl.cast(k // 128, tl.int64)
                    x_scale = load_vector(x_scale_ptr + s * stride_xss, t, T, stride_xst, BLOCK_ROWS)
                    w_scale = _w_scale(w_scale_ptr + s * stride_wss, n_turn, N, stride_wsn, SHARED, TURN)
                    # Scales first: a scale that columns share then costs nothing an element. What two tiny
                    # ones lose is no more than the smallest normal number.
                    acc += products * (x_scale[:, None] * w_scale)
                elif not PROMOTE:
                    acc = tl.dot(x_block, w_block.T, acc)
                elif IN_PLACE:  # Triton adds the sums of DEPTH up in fp32, where tensor cores do not
                    acc = tl.dot(x_block, w_block.T, acc, max_num_imprecise_acc=BLOCK_DEPTH)
                else:
                    acc += tl.dot(x_block, w_block.T, max_num_imprecise_acc=BLOCK_DEPTH)
                sums = sums[1:] + (acc,)  # noqa: RUF005  # Triton has no star in a tuple
        parts = _split_columns_of(sums, PARTS // TURNS)
        if not BY_BLOCK:
            x_rest, x_root = halves(load_vector(x_scale_ptr, t, T, stride_xst, BLOCK_ROWS)[:, None])
        for p in tl.static_range(PARTS):
            n_part = n + p * PART
            value = parts[p]
            if not BY_BLOCK:
                w_rest, w_root = halves(_w_scale(w_scale_ptr, n_part, N, stride_wsn, SHARED, PART))
                value = value * w_rest * x_rest * (w_root * x_root)
            if HAS_BIAS:
                value += load_vector(b_ptr, n_part, N, stride_bn, PART)[None, :]
            if KEEP_Z:
                store_block(z, value, t, n_part, T, N, N, 1, TMA)
            store_block(y, act(value, ACTIVATION, FAST), t, n_part, T, N, N, 1, TMA)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr):
    """A tuple of COUNT (a power of two) blocks."""
    if COUNT == 1:
        return (tl.zeros((ROWS, COLS), tl.float32),)
    else:
        return _zeros(ROWS, COLS, COUNT // 2) + _zeros(ROWS, COLS, COUNT // 2)


@triton.jit
def _split_columns_of(sums, PARTS: tl.constexpr):
    """`split_columns` of each block, left to right."""
    if len(sums) == 1:
        return split_columns(sums[0], PARTS)
    else:
        return split_columns(sums[0], PARTS) + _split_columns_of(sums[1:], PARTS)


@triton.jit
def _w_scale(source, n, N, stride, SHARED: tl.constexpr, SIZE: tl.constexpr):
    """The scales of SIZE rows of w from n, to multiply the columns of a block: one where they share it."""
    if SHARED >= SIZE:  # both are powers of two
        return tl.load(source + (n // SHARED).to(tl.int64) * stride)
    else:
        i = n + tl.arange(0, SIZE)
        return tl.load(source + (i // SHARED).to(tl.int64) * stride, mask=i < N, other=0.0)[None, :]


MOST_SUMS = 128  # fp32 registers of a thread that sums of a tile may take, promoted ones beside them


def _turns(product: launch.ProductLaunch) -> int:
    """In how many turns columns are promoted: in one where sums and all that is added to them fit."""
    tile = product.tile
    in_registers = product.target.backend == "cuda" and product.target.capability < 100
    few = 2 * tile.block_rows * tile.block_cols <= MOST_SUMS * 32 * tile.num_warps
    return 2 if in_registers and product.form == "descriptor" and not few else 1


@planned
def scaled_linear_fwd(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    keep_z: bool = False,
    dtype: str = "bfloat16",
    fast_accumulate: bool = False,
    out: launch.Out = None,
    arrivals: Arrivals | None = None,
    first_row: int = 0,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> LinearForward:
    """act(x̂ ŵᵀ + bias) in `dtype`, with x̂ = x * x_scale and ŵ = weight * w_scale.

    x: (tokens, in_features) in e4m3 or e5m2, its rows contiguous
    weight: (out_features, in_features), in e4m3 or e5m2, its rows contiguous
    x_scale: (tokens, S) in fp32; S is 1, or in_features / 128, rounded up
    w_scale: (out_features, S), or (out_features / 128, rounded up, S), a row for each 128 rows of weight
    bias: (out_features,)
    fast_accumulate: tensor cores may sum all of the depth, in as few bits as they have; False: 128 at most
    out: where y is written, and z if it is kept and not y; rows of larger matrices, say
    arrivals: of the chunks of x and of its scales, each of which is read once its flag is up
    first_row, margin: as of `waits.Wait`
    """
    name = "scaled_linear_fwd"
    if dtype not in RESULTS:
        raise ValueError(f"{name}: expected dtype of {', '.join(RESULTS)}; got {dtype!r}")
    require_scaled(name, ("x", x, x_scale), ("weight", weight, w_scale))
    require_activation(name, activation)
    (T, K), N, into = x.shape, weight.shape[0], RESULTS[dtype]
    why = f"(out_features, in_features) for x {tuple(x.shape)}"
    require_shape(name, "weight", weight, (N, K), why)
    if bias is not None:
        require_tensors(name, ("bias", bias))
    require_shape(name, "bias", bias, (N,), f"(out_features,) of weight {tuple(weight.shape)}")
    require_fp8(name, target_of(x.device))
    separate_z = keep_z and activation != "none"
    wanted = {"y": (T, N), "z": (T, N)} if separate_z else {"y": (T, N)}
    inputs = (("x", x), ("weight", weight), ("x_scale", x_scale), ("w_scale", w_scale), ("bias", bias))
    written = launch.results(name, out, wanted, inputs, dtype=into)
    y, z = written[0], written[-1]
    matrices = (("x", x), ("weight", weight), ("y", y), ("z", z))
    wait = Wait(arrivals, first_row, margin)
    product = launch.product(name, "linear", matrices, (T, N), tile, form, wait)
    if product.tile.block_depth > BLOCK:
        raise ValueError(f"{name}: expected a tile of at most {BLOCK} depth, got {product.tile}")
    if y.numel():
        by_block = x_scale.shape[1] != 1
        promote = by_block or not fast_accumulate
        turns = _turns(product) if promote else 1
        y_block = product.block(y, "rows", "part")
        product.start(_scaled_linear_kernel)(
            product.block(x, "rows", "depth"),
            product.columns_cut(turns).block(weight, "cols", "depth"),
            x_scale,
            w_scale,
            y if bias is None else bias,
            product.block(z, "rows", "part") if separate_z else y_block,
            y_block,
            T,
            N,
            K,
            x.stride(0),
            weight.stride(0),
            *x_scale.stride(),
            *w_scale.stride(),
            0 if bias is None else bias.stride(0),
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            KEEP_Z=separate_z,
            FAST=fast_math(into, product.target),
            BY_BLOCK=by_block,
            SHARED=1 if w_scale.shape[0] == N else BLOCK,
            PROMOTE=promote,
            IN_PLACE=product.target.has_tma,
            TURNS=turns,
        )
    return LinearForward(y, z if keep_z else None)
