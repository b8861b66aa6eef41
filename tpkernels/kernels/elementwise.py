"""What follows a product that a library computed, in one pass: kernels and launchers. Oracles: `reference`.

T tokens, K features:

    h  = f(z), or f(g) * u               (T, K)    `activate`
    dz = dy * f'(z)                      (T, K)    `act_grad`
    db = Σ over tokens of dz             (K,)      of the fp32 dz; on request
    dg, du, h = dh * u * f'(g), dh * f(g), f(g) * u    (T, K) each    `glu_grad`

All is computed in fp32 and rounded once. The products that are read were rounded before; an epilogue of ours
reads them in fp32, so its last bits differ, as do those of torch's operators, each of which rounds.

A result may take the place of an operand: a program has read its block of all of them before it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, require_activation, require_glu
from tpkernels.kernels.bias_grad import sum_partials
from tpkernels.kernels.dglu import DgluGrads
from tpkernels.kernels.dgrad import DgradAct
from tpkernels.kernels.epilogues import act, act_and_grad
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Named, require_matrices, require_shape
from tpkernels.kernels.target import fast_math, target_of
from tpkernels.kernels.tiles import ELEMENTS, INTERPRETED_ELEMENTS, BlockTile

mend()


@triton.jit
def _block(T, K, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The rows and columns of a program's block, and where they are within the matrix."""
    col_tiles = tl.cdiv(K, BLOCK_COLS)
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = (tl.program_id(0) // col_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = (tl.program_id(0) % col_tiles * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    return t[:, None], k[None, :], (t < T)[:, None] & (k < K)[None, :]


@triton.jit
def _store(target_ptr, offsets, values, mask):
    tl.store(target_ptr + offsets, values.to(target_ptr.dtype.element_ty), mask)


@triton.jit
def _activate_kernel(
    z_ptr,  # (T, K)
    u_ptr,  # (T, K), unread unless GATED
    h_ptr,  # (T, K) contiguous
    T,
    K,
    stride_zt,
    stride_zk,
    stride_ut,
    stride_uk,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes one block of h."""
    t, k, mask = _block(T, K, BLOCK_ROWS, BLOCK_COLS)
    z = tl.load(z_ptr + t * stride_zt + k * stride_zk, mask, 0.0).to(tl.float32)
    if GATED:
        u = tl.load(u_ptr + t * stride_ut + k * stride_uk, mask, 0.0).to(tl.float32)
        _store(h_ptr, t * K + k, act(z, ACTIVATION, FAST) * u, mask)
    else:
        _store(h_ptr, t * K + k, act(z, ACTIVATION, FAST), mask)


@triton.jit
def _act_grad_kernel(
    dy_ptr,  # (T, K)
    z_ptr,  # (T, K)
    dz_ptr,  # (T, K) contiguous
    partials_ptr,  # (row blocks, K) contiguous, fp32; untouched unless BIAS_GRAD
    T,
    K,
    stride_dyt,
    stride_dyk,
    stride_zt,
    stride_zk,
    ACTIVATION: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes one block of dz, and its sum over rows."""
    t, k, mask = _block(T, K, BLOCK_ROWS, BLOCK_COLS)
    dy = tl.load(dy_ptr + t * stride_dyt + k * stride_dyk, mask, 0.0).to(tl.float32)
    z = tl.load(z_ptr + t * stride_zt + k * stride_zk, mask, 0.0).to(tl.float32)
    _, slope = act_and_grad(z, ACTIVATION, FAST)
    dz = dy * slope
    _store(dz_ptr, t * K + k, dz, mask)
    if BIAS_GRAD:
        col_tiles = tl.cdiv(K, BLOCK_COLS)
        row_tile, col = tl.program_id(0) // col_tiles, tl.program_id(0) % col_tiles * BLOCK_COLS
        columns = col + tl.arange(0, BLOCK_COLS)
        # rows past T are zeros: dy is, and the slope at zero is a number
        tl.store(partials_ptr + row_tile.to(tl.int64) * K + columns, tl.sum(dz, axis=0), columns < K)


@triton.jit
def _glu_grad_kernel(
    dh_ptr,  # (T, K)
    g_ptr,  # (T, K)
    u_ptr,  # (T, K)
    dg_ptr,  # (T, K) contiguous
    du_ptr,  # (T, K) contiguous
    h_ptr,  # (T, K) contiguous
    T,
    K,
    stride_dht,
    stride_dhk,
    stride_gt,
    stride_gk,
    stride_ut,
    stride_uk,
    GATE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes one block of dg, du and h."""
    t, k, mask = _block(T, K, BLOCK_ROWS, BLOCK_COLS)
    dh = tl.load(dh_ptr + t * stride_dht + k * stride_dhk, mask, 0.0).to(tl.float32)
    g = tl.load(g_ptr + t * stride_gt + k * stride_gk, mask, 0.0).to(tl.float32)
    u = tl.load(u_ptr + t * stride_ut + k * stride_uk, mask, 0.0).to(tl.float32)
    gate, slope = act_and_grad(g, GATE, FAST)
    _store(dg_ptr, t * K + k, dh * u * slope, mask)
    _store(du_ptr, t * K + k, dh * gate, mask)
    _store(h_ptr, t * K + k, gate * u, mask)


@planned
def activate(
    z: Tensor, u: Tensor | None = None, *, activation: Activation, out: Tensor | None = None
) -> Tensor:
    """f(z), or f(z) * u, in the dtype of z.

    z, u: (tokens, features), of any strides
    out: where it is written; rows of a larger matrix, say, or z or u itself
    """
    launcher, operands = "activate", (("z", z), ("u", u))
    _require_alike(launcher, operands)
    require_activation(launcher, activation)
    (h,) = launch.results(launcher, out, {"h": tuple(z.shape)}, operands, in_place=True)
    second = z if u is None else u
    _start(_activate_kernel, (z, second), (h,), ACTIVATION=activation, GATED=u is not None)
    return h


@planned
def act_grad(
    dy: Tensor, z: Tensor, activation: Activation, *, bias_grad: bool = False, out: launch.Out = None
) -> DgradAct:
    """The gradient of z in `act(z)`, in the dtype of dy, and on request its sum over tokens in fp32.

    dy, z: (tokens, features), of any strides
    out: where dz is written (rows of a larger matrix, say, or dy or z itself), and db, if it is asked for
    """
    launcher, operands = "act_grad", (("dy", dy), ("z", z))
    _require_alike(launcher, operands)
    require_activation(launcher, activation)
    T, K = dy.shape
    wanted: dict[str, tuple[int, ...]] = {"dz": (T, K)} | ({"db": (K,)} if bias_grad else {})
    dz, *db = launch.results(launcher, out, wanted, operands, in_place=True)
    partials = dz
    if bias_grad:
        partials = launch.empty((launch.ceil_div(T, _tile(dy).block_rows), K), torch.float32, dy.device)
    _start(_act_grad_kernel, (dy, z), (dz, partials), ACTIVATION=activation, BIAS_GRAD=bias_grad)
    return DgradAct(dz, sum_partials(partials, out=db[0]) if bias_grad else None)


@planned
def glu_grad(dh: Tensor, g: Tensor, u: Tensor, *, kind: Glu = "swiglu", out: launch.Out = None) -> DgluGrads:
    """The gradients of g and u in `f(g) * u`, f being the activation of `kind`, and h = f(g) * u again.

    dh, g, u: (tokens, features), of any strides
    out: where dg, du and h are written; rows of larger matrices, say, or any of dh, g and u
    """
    launcher, operands = "glu_grad", (("dh", dh), ("g", g), ("u", u))
    _require_alike(launcher, operands)
    require_glu(launcher, kind)
    wanted = dict.fromkeys(("dg", "du", "h"), tuple(dh.shape))
    results = launch.results(launcher, out, wanted, operands, in_place=True)
    _start(_glu_grad_kernel, (dh, g, u), results, GATE=GATE_OF[kind])
    return DgluGrads(*results)


def _require_alike(launcher: str, operands: Sequence[Named]) -> None:
    require_matrices(launcher, *operands)
    (name, first), *others = operands
    assert first is not None, "the first operand is always there"
    for other, matrix in others:
        require_shape(launcher, other, matrix, tuple(first.shape), f"that of {name}")


def _tile(like: Tensor) -> BlockTile:
    return INTERPRETED_ELEMENTS if target_of(like.device).backend == "interpreter" else ELEMENTS


def _start(
    kernel: object, operands: tuple[Tensor, ...], results: tuple[Tensor, ...], **constants: object
) -> None:
    """Launch a kernel that takes operands, results, sizes and the strides of operands, in this order."""
    first, tile = operands[0], _tile(operands[0])
    T, K = first.shape
    if not first.numel():
        return
    programs = launch.ceil_div(T, tile.block_rows) * launch.ceil_div(K, tile.block_cols)
    strides = [stride for operand in operands for stride in operand.stride()]
    launch.on(first.device, kernel, (programs,))(
        *operands,
        *results,
        T,
        K,
        *strides,
        **constants,
        FAST=fast_math(first.dtype, target_of(first.device)),
        BLOCK_ROWS=tile.block_rows,
        BLOCK_COLS=tile.block_cols,
        num_warps=tile.num_warps,
    )
