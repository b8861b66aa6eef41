"""A product of fp8 with a scale a row, whose sums one consumer adds while the other multiplies.

Two consumers of 4 warps share every tile, and every buffer of operands: each multiplies its half of the rows
by the same columns. Promoted, a consumer waits for the products of a step, and adds them to its sums in fp32;
the tensor cores have the other's products meanwhile. A buffer is free when both have read it.

    x_rings    `stages` buffers of each half of the rows
    weights    `stages` buffers of the columns

In a pair of blocks each has half of the rows of each half, and the columns are loaded once (see `roles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.epilogues import halves
from tpkernels.kernels.gluon import epilogues
from tpkernels.kernels.gluon.constants import BARRIERS
from tpkernels.kernels.gluon.matmul import described, halves_of_pair
from tpkernels.kernels.gluon.roles import barriers, barriers_of_both, multiply, place_of, release
from tpkernels.kernels.recipe import BLOCK
from tpkernels.kernels.target import fast_math
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.triton_versions import gluon_copies

async_load, _, _ = gluon_copies()
MOST_SUMS = 128  # registers of a thread for sums, with the products that are added to them
WARPS, ROWS = 4, 64  # of a consumer; rows that its products have at least


@dataclass(frozen=True, slots=True)
class ScaledConstants:
    """All constants of such a product; what `roles` and `epilogues` ask for has their names."""

    activation: str
    vector: bool  # whether there is a bias
    outputs: int
    fast: bool
    shared: int  # rows of the weight that share a scale
    blocks: int
    block_rows: int
    block_cols: int
    block_depth: int
    parts: int
    group: int
    stages: int
    staging: int
    part: int
    turns: int  # in which columns are promoted; 0: they are not
    half_rows: int
    consumers: int = 1  # that multiply a tile's rows, so that none awaits its turn
    depth_first: bool = False
    tensor_memory: bool = False
    across: bool = False
    adds: bool = False


@cache
def scaled_constants_of(
    tile: MatmulTile,
    shared_memory: int,
    *,
    activation: str,
    vector: bool,
    outputs: int,
    fast: bool,
    shared: int,
    promote: bool,
) -> ScaledConstants:
    """The constants of a product of fp8 with this tile; ValueError if it does not fit.

    shared_memory: bytes that a program can have
    """
    rows, part = tile.block_rows // tile.blocks // 2, tile.block_cols // tile.parts
    if tile.num_stages < 2 or tile.num_warps != WARPS or rows < ROWS:
        raise ValueError(
            f"scaled_linear: expected at least 2 stages, and consumers of {WARPS} warps with at least {ROWS} "
            f"rows, got {tile.name}"
        )
    left = shared_memory - BARRIERS - tile.num_stages * (2 * rows + tile.block_cols) * tile.block_depth
    left -= 2 * 4 * tile.block_cols * (1 + vector)
    room = left // (2 * 2 * rows * part)  # staging buffers of each consumer, for a result of 16 bits
    stores = tile.parts * outputs
    staging = next((n for n in (4, 3, 2, 1) if stores % n == 0 and n <= room), 0)
    if not staging:
        raise ValueError(
            f"scaled_linear: expected a tile of at most {shared_memory:,} bytes, got {tile.name}"
        )
    sums = rows * tile.block_cols // (32 * WARPS)
    return ScaledConstants(
        activation=activation,
        vector=vector,
        outputs=outputs,
        fast=fast,
        shared=shared,
        blocks=tile.blocks,
        block_rows=tile.block_rows,
        block_cols=tile.block_cols,
        block_depth=tile.block_depth,
        parts=tile.parts,
        group=tile.group,
        stages=tile.num_stages,
        staging=staging,
        part=part,
        turns=0 if not promote else 1 if 2 * sums <= MOST_SUMS else 2,
        half_rows=tile.block_rows // 2,
    )


# one binary for all sizes: the one that was tried on a GPU is the one that runs
@gluon.jit(
    do_not_specialize=["rows", "cols", "depth", "stride_x_scale", "stride_w_scale", "stride_bias"],
    do_not_specialize_on_alignment=["x_scale_ptr", "w_scale_ptr", "bias_ptr"],
)
def _scaled_matmul_kernel(
    x,  # (rows, depth) of fp8, like every matrix here a tensor descriptor
    w,  # (cols, depth) of fp8
    x_scale_ptr,  # (rows,) fp32
    w_scale_ptr,  # (cols,) fp32, or one for each `shared` of them
    bias_ptr,  # (cols,), unread unless there is one
    y,  # (rows, cols)
    z,  # (rows, cols), untouched unless it is kept
    rows,
    cols,
    depth,
    stride_x_scale,
    stride_w_scale,
    stride_bias,
    PROMOTE: gl.constexpr,  # what `check` asks for: as P says
    P: gl.constexpr,  # ScaledConstants
):
    """Each program, a block or a pair of them, computes every num_programs-th tile."""
    STAGES: gl.constexpr = P.stages
    upper = gl.allocate_shared_memory(x.dtype, [STAGES, P.half_rows, P.block_depth], x.layout)
    lower = gl.allocate_shared_memory(x.dtype, [STAGES, P.half_rows, P.block_depth], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [STAGES, P.block_cols, P.block_depth], w.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES, 2)
    both = barriers_of_both(STAGES, 2)
    fence_async_shared()
    vectors = x_scale_ptr, w_scale_ptr, bias_ptr
    strides = stride_x_scale, stride_w_scale, stride_bias
    outs = y, z, y
    gl.warp_specialize(
        [
            (
                _consume,
                ((upper, weights, full, empty, both), outs, vectors, strides, rows, cols, depth, 0, P),
            ),
            (
                _consume,
                ((lower, weights, full, empty, both), outs, vectors, strides, rows, cols, depth, 1, P),
            ),
            (_load, (x, w, upper, lower, (weights, full, empty, both), rows, cols, depth, P)),
        ],
        [4, 1],
        [232, 24],
    )
    if P.blocks == 2:  # the second block may still arrive at barriers of the first
        gl.barrier(cluster=True)


@gluon.jit
def _load(x, w, upper, lower, shared, rows, cols, depth, P: gl.constexpr):
    """Fill the buffers of operands for every tile of this program."""
    GROUP: gl.constexpr = P.group
    STAGES: gl.constexpr = P.stages
    PAIR: gl.constexpr = P.blocks == 2
    weights, full, empty, both = shared
    row_tiles = gl.cdiv(rows, P.block_rows)
    col_tiles = gl.cdiv(cols, P.block_cols)
    use = 0
    for index in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row = row_tile * P.block_rows
        col = col_tile * P.block_cols
        for k in range(0, depth, P.block_depth):
            buffer, phase = place_of(use, STAGES)
            landed = full.index(buffer)
            mbarrier.wait(empty.index(buffer), phase ^ 1)
            mbarrier.expect(landed, 2 * x.nbytes_per_cta + w.nbytes_per_cta)
            async_load(x, [row, k], landed, upper.index(buffer))
            async_load(x, [row + P.half_rows, k], landed, lower.index(buffer))
            if PAIR:  # its own rows do not wait for the other block
                mbarrier.wait(both.index(buffer), phase ^ 1)
            async_load(w, [col, k], landed, weights.index(buffer), multicast=PAIR)
            use += 1


@gluon.jit
def _consume(operands, outs, vectors, strides, rows, cols, depth, HALF: gl.constexpr, P: gl.constexpr):
    """Compute half of the rows of each of the program's tiles."""
    GROUP: gl.constexpr = P.group
    SHARED: gl.constexpr = P.shared
    TURNS: gl.constexpr = P.turns
    WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = [[1, 0]] if P.blocks == 2 else []
    ALIKE: gl.constexpr = [[0]] if P.blocks == 2 else []
    WIDTH: gl.constexpr = P.block_cols // max(1, P.turns)
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 32], HALVES)
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P.part, 32], HALVES)
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0], ALIKE)
    PIECES: gl.constexpr = WIDTH // P.part
    x_scale_ptr, w_scale_ptr, bias_ptr = vectors
    stride_x_scale, stride_w_scale, stride_bias = strides
    staging = gl.allocate_shared_memory(outs[0].dtype, [P.staging, P.half_rows, P.part], outs[0].layout)
    scale = epilogues.bias_buffer(True, P)
    bias = epilogues.bias_buffer(P.vector, P)
    row_tiles = gl.cdiv(rows, P.block_rows)
    col_tiles = gl.cdiv(cols, P.block_cols)
    steps = gl.cdiv(depth, P.block_depth)
    number = 0
    for index in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row = row_tile * P.block_rows + HALF * P.half_rows
        col = col_tile * P.block_cols
        # read before the products, which hide how long it takes
        tokens = row + gl.arange(0, P.half_rows, gl.SliceLayout(1, NARROW))
        x_scale = gl.load(x_scale_ptr + tokens.to(gl.int64) * stride_x_scale, mask=tokens < rows, other=0.0)
        columns = col + gl.arange(0, P.block_cols, COLUMNS)
        w_scale = gl.load(
            w_scale_ptr + (columns // SHARED).to(gl.int64) * stride_w_scale, mask=columns < cols, other=0.0
        )
        if P.vector:
            added = gl.load(bias_ptr + columns.to(gl.int64) * stride_bias, mask=columns < cols, other=0.0).to(
                gl.float32
            )
        sums = gl.full([P.half_rows, WIDTH], 0.0, gl.float32, WHOLE)
        if TURNS == 0:
            parts = epilogues.split_columns(multiply(sums, operands, (), number, steps, 0, P), PIECES, NARROW)
        elif TURNS == 1:
            found = _promoted((sums,), operands, number, steps, P)
            parts = epilogues.split_columns(found[0], PIECES, NARROW)
        else:
            found = _promoted((sums, sums), operands, number, steps, P)
            parts = epilogues.split_columns(found[0], PIECES, NARROW)
            parts = parts + epilogues.split_columns(found[1], PIECES, NARROW)
        scale.store(w_scale)
        if P.vector:
            bias.store(added)
        x_rest, x_root = halves(x_scale[:, None])
        parts = _scaled(parts, scale, x_rest, x_root, NARROW, P)
        epilogues.linear(parts, outs, bias, staging, row, col, NARROW, P)
        number += P.consumers
    tma.store_wait(0)


@gluon.jit
def _promoted(sums, operands, tile, steps, P: gl.constexpr):
    """Sums of neighbouring columns plus the products of all steps of a tile, each step's added in fp32."""
    STAGES: gl.constexpr = P.stages
    x_ring, weights, full, empty, both = operands
    for step in range(steps):
        buffer, phase = place_of(tile * steps + step, STAGES)
        mbarrier.wait(full.index(buffer), phase)
        sums = _plus_products(sums, x_ring.index(buffer), weights.index(buffer), 0)
        release(empty, both, buffer, True)
    return sums


@gluon.jit
def _plus_products(sums, x_block, w_block, FIRST: gl.constexpr):
    """The sums, one after the other, plus the products of a step; columns begin at FIRST of the weights."""
    acc = sums[0]
    WIDTH: gl.constexpr = acc.shape[1]
    columns = w_block.slice(FIRST, WIDTH).permute((1, 0))
    products = warpgroup_mma(x_block, columns, gl.zeros_like(acc), use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=(products,))
    acc += products
    first = (acc,)
    if len(sums) == 1:
        return first
    else:
        return first + _plus_products(sums[1:], x_block, w_block, FIRST + WIDTH)


@gluon.jit
def _scaled(parts, scale, x_rest, x_root, LAYOUT: gl.constexpr, P: gl.constexpr):
    """Sums times the scales of their rows and columns, as the plain kernel multiplies them."""
    PARTS: gl.constexpr = P.parts
    found = parts[:0]
    for p in gl.static_range(PARTS):
        w_scale = scale.slice(p * P.part, P.part).load(gl.SliceLayout(0, LAYOUT))
        w_rest, w_root = halves(w_scale[None, :])
        part = (parts[p] * w_rest * x_rest * (w_root * x_root),)
        found = found + part
    return found


def launch_scaled(
    product: launch.ProductLaunch,
    operands: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    outputs: Sequence[Tensor],
    *,
    activation: str,
    promote: bool,
) -> None:
    """What `gluon.multiply_scaled` does, where it can.

    outputs: y, and z if it is kept and not y
    """
    (x, w), (x_scale, w_scale), tile = operands, scales, product.tile
    consts = scaled_constants_of(
        tile,
        product.target.shared_memory,
        activation=activation,
        vector=bias is not None,
        outputs=len(outputs),
        fast=fast_math(outputs[0].dtype, product.target),
        shared=1 if w_scale.shape[0] == product.cols else BLOCK,
        promote=promote,
    )
    split, alike = halves_of_pair(tile)
    part = consts.half_rows, consts.part
    y, z = (described(one, part, split) for one in (outputs[0], outputs[-1]))
    grid = launch.grid(product.target, "descriptor", tile, product.rows, product.cols)
    launch.on(x.device, _scaled_matmul_kernel, grid)(
        described(x, (consts.half_rows, consts.block_depth), split),
        described(w, (consts.block_cols, consts.block_depth), alike),
        x_scale,
        w_scale,
        x_scale if bias is None else bias,
        y,
        z,
        product.rows,
        product.cols,
        x.shape[1],
        x_scale.stride(0),
        w_scale.stride(0),
        0 if bias is None else bias.stride(0),
        PROMOTE=promote,
        P=consts,
        num_warps=tile.num_warps,
        **({"num_ctas": 2} if tile.blocks == 2 else {}),
    )
