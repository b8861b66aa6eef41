"""The warp-specialised product: one kernel with one of four epilogues, and what launches it.

    epilogue  product                        reads    writes
    linear    x wᵀ                           bias     y, z on request
    glu       x wgᵀ and x wuᵀ side by side            h; g and u on request
    dgrad     dy w                           z        dx or dz; sums of its rows on request
    dglu      dy w                           g, u     dg, du; h on request

Each computes what the plain kernel of its name does, and what its launcher has checked. One consumer of 8 warps works
on each tile; or two of 4 warps take tiles in turn, and the products of one run beside the epilogue of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.gluon import epilogues
from tpkernels.kernels.gluon.plan import Plan
from tpkernels.kernels.gluon.roles import barriers, fetch, load, multiply
from tpkernels.kernels.operands import Layout
from tpkernels.kernels.target import Target


@gluon.jit
def _matmul_kernel(
    a,  # (rows, depth), like every matrix here a tensor descriptor
    b,  # (cols, depth), or (depth, cols) if depth_first
    b2,  # (cols, depth), unread unless there are two weights
    in0,  # (rows, cols) z or g, unread unless there are inputs
    in1,  # (rows, cols) u
    out0,  # (rows, cols) y, h, dx or dg
    out1,  # (rows, cols) z, g or du, untouched if not asked for
    out2,  # (rows, cols) u or h, likewise
    vector_ptr,  # (cols,) bias of linear, or (row tiles, cols) sums of dgrad in fp32; untouched without
    rows,
    cols,
    depth,
    P: gl.constexpr,  # a Plan
):
    """Each program computes every num_programs-th tile."""
    STAGES: gl.constexpr = P.stages
    SLOTS: gl.constexpr = P.slots
    B_ROWS: gl.constexpr = P.block_depth if P.depth_first else P.width
    B_COLS: gl.constexpr = P.width if P.depth_first else P.block_depth
    operands = (
        gl.allocate_shared_memory(a.dtype, [P.stages, P.block_rows, P.block_depth], a.layout),
        gl.allocate_shared_memory(b.dtype, [P.stages, B_ROWS, B_COLS], b.layout),
        barriers(STAGES),
        barriers(STAGES),
    )
    if P.inputs:
        inputs = (
            gl.allocate_shared_memory(in0.dtype, [P.slots, P.inputs * P.block_rows, P.part], in0.layout),
            barriers(SLOTS),
            barriers(SLOTS),
        )
    else:
        inputs = ()
    fence_async_shared()
    outs = out0, out1, out2
    if P.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (operands, inputs, outs, vector_ptr, rows, cols, depth, 0, P)),
                (load, (a, b, b2, operands, rows, cols, depth, P)),
                (fetch, (in0, in1, inputs, rows, cols, P)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (operands, inputs, outs, vector_ptr, rows, cols, depth, 0, P)),
                (_consume, (operands, inputs, outs, vector_ptr, rows, cols, depth, 1, P)),
                (load, (a, b, b2, operands, rows, cols, depth, P)),
                (fetch, (in0, in1, inputs, rows, cols, P)),
            ],
            [4, 1, 1],
            [232, 24, 24],
        )


@gluon.jit
def _consume(operands, inputs, outs, vector_ptr, rows, cols, depth, FIRST: gl.constexpr, P: gl.constexpr):
    """Compute every consumers-th of the program's tiles from its FIRST on."""
    GROUP: gl.constexpr = P.group
    WARPS: gl.constexpr = gl.num_warps()
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P.width, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P.part, 16])
    
    staging = gl.allocate_shared_memory(outs[0].dtype, [P.staging, P.block_rows, P.part], outs[0].layout)
    ADDED: gl.constexpr = P.epilogue == "linear" and P.vector
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    bias = ()
    if ADDED:
        bias = gl.allocate_shared_memory(gl.float32, [P.block_cols], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    PIECES: gl.constexpr = P.width // P.part
    row_tiles = gl.cdiv(rows, P.block_rows)
    col_tiles = gl.cdiv(cols, P.block_cols)
    steps = gl.cdiv(depth, P.block_depth)
    number = FIRST
    first = gl.program_id(0) + FIRST * gl.num_programs(0)
    for index in range(first, row_tiles * col_tiles, P.consumers * gl.num_programs(0)):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row = row_tile * P.block_rows
        col = col_tile * P.block_cols
        if ADDED:  # read before the products, which hide how long it takes
            columns = col + gl.arange(0, P.block_cols, COLUMNS)
            added = gl.load(vector_ptr + columns, mask=columns < cols, other=0.0).to(gl.float32)
        acc = gl.full([P.block_rows, P.width], 0.0, gl.float32, WHOLE)
        acc = multiply(acc, operands, number * steps, steps, P)
        parts = epilogues.split_columns(acc, PIECES, NARROW)
        if P.epilogue == "linear":
            if ADDED:
                bias.store(added)
            epilogues.linear(parts, outs, bias, staging, row, col, NARROW, P)
        elif P.epilogue == "glu":
            epilogues.glu(parts, outs, staging, row, col, P)
        elif P.epilogue == "dgrad":
            epilogues.dgrad(
                parts, outs, vector_ptr, inputs, number * P.parts, staging, row, col, rows, cols, NARROW, P
            )
        else:
            epilogues.dglu(parts, outs, inputs, number * P.parts, staging, row, col, NARROW, P)
        number += P.consumers
    tma.store_wait(0)
