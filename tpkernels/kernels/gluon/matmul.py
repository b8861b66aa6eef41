"""The warp-specialised product: one kernel with one of five epilogues, and what launches it.

    epilogue  product                        reads    writes
    linear    x wᵀ                           bias     y, z on request
    glu       x wgᵀ and x wuᵀ side by side            h; g and u on request
    dgrad     dy w, or dy w + dy2 w2         z        dx or dz; sums of its rows on request
    dglu      dy w                           g, u     dg, du; h on request
    wgrad     dyᵀ x                          dw       dw; or adds to it, and then reads it only in 16 bits

Each computes what the plain kernel of its name does, whose launcher checks what it is given. One consumer
of 8 warps works on every tile; or two of 4 warps take tiles in turn, and the products of one run during the
epilogue of the other. Two blocks may be a pair: a tile is theirs together, each has half of its rows, and
what both multiply by is loaded once (see `roles`). Shapes and layouts here are then the pair's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.gluon import epilogues, tensor_memory
from tpkernels.kernels.gluon.constants import Epilogue, constants_of
from tpkernels.kernels.gluon.roles import (
    await_turn,
    fetch,
    give_turn,
    input_ring,
    load,
    multiply,
    operand_ring,
    turn_barriers,
)
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import MatrixLayout

Halves = tuple[tuple[int, int], ...]  # where the second block of a pair begins, in halves; () without one
_OF_PAIR: tuple[Halves, Halves] = (((1, 0),), ((0, 0),))  # of what is split by rows, and of what both have
_ACROSS: Halves = ((0, 1),)  # of what is split by columns


# one binary for all sizes: the one that was tried on a GPU is the one that runs
@gluon.jit(
    do_not_specialize=["rows", "cols", "depth", "depth2", "stride_vector"],
    do_not_specialize_on_alignment=["vector_ptr"],
)
def _matmul_kernel(
    a,  # (rows, depth), or (depth, rows) if across; like every matrix here a tensor descriptor
    b,  # (cols, depth), or (depth, cols) if depth_first
    a2,  # (rows, depth2), unread unless there are two pairs
    b2,  # like b, unread unless there are two weights or pairs
    in0,  # (rows, cols) z, g or dw, unread unless there are inputs
    in1,  # (rows, cols) u
    out0,  # (rows, cols) y, h, dx, dg or dw
    out1,  # (rows, cols) z, g or du, untouched if not asked for
    out2,  # (rows, cols) u or h, likewise
    vector_ptr,  # (cols,) bias of linear, or (row tiles * blocks, cols) sums of dgrad; untouched without
    rows,
    cols,
    depth,
    depth2,  # 0 unless there are two pairs
    stride_vector,  # of the bias
    P: gl.constexpr,  # ProductConstants
):
    """Each program, a block or a pair of them, computes every num_programs-th tile."""
    operands = operand_ring(a, b, P)
    inputs = input_ring(in0, P)
    turns = turn_barriers(P)
    sums = tensor_memory.sum_ring(P)
    fence_async_shared()
    steps = gl.cdiv(depth, P.block_depth)
    if P.pairs == 2:
        steps += gl.cdiv(depth2, P.block_depth)
    outs = out0, out1, out2
    if P.tensor_memory:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (operands, inputs, (sums, ()), outs, vector_ptr, rows, cols, steps, stride_vector, 0, P),
                ),
                (load, (a, b, a2, b2, operands, rows, cols, depth, depth2, P)),
                (fetch, (in0, in1, inputs, rows, cols, P)),
                (tensor_memory.multiply, (operands, sums, rows, cols, steps, P)),
            ],
            [1, 1, 1],
            [24, 24, 24],
        )
    elif P.consumers == 1:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (operands, inputs, turns, outs, vector_ptr, rows, cols, steps, stride_vector, 0, P),
                ),
                (load, (a, b, a2, b2, operands, rows, cols, depth, depth2, P)),
                (fetch, (in0, in1, inputs, rows, cols, P)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (operands, inputs, turns, outs, vector_ptr, rows, cols, steps, stride_vector, 0, P),
                ),
                (
                    _consume,
                    (operands, inputs, turns, outs, vector_ptr, rows, cols, steps, stride_vector, 1, P),
                ),
                (load, (a, b, a2, b2, operands, rows, cols, depth, depth2, P)),
                (fetch, (in0, in1, inputs, rows, cols, P)),
            ],
            [4, 1, 1],
            [232, 24, 24],
        )
    if P.blocks == 2:  # the second block may still arrive at barriers of the first
        gl.barrier(cluster=True)


@gluon.jit
def _consume(
    operands,
    inputs,
    turns,
    outs,
    vector_ptr,
    rows,
    cols,
    steps,
    stride_vector,
    FIRST: gl.constexpr,
    P: gl.constexpr,
):
    """Compute every consumers-th of the program's tiles from its FIRST on.

    turns: those to multiply, and to take inputs; or the ring of sums in tensor memory, and nothing
    """
    GROUP: gl.constexpr = P.group
    WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = [[1, 0]] if P.blocks == 2 else []
    ALIKE: gl.constexpr = [[0]] if P.blocks == 2 else []
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P.width, 16], HALVES)
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0], ALIKE)
    PIECES: gl.constexpr = P.width // P.part
    ADDED: gl.constexpr = P.epilogue == "linear" and P.vector
    products, takings = turns
    NARROW: gl.constexpr = (
        products[0].index(0).slice(0, P.part, dim=1).get_reg_layout()
        if P.tensor_memory
        else gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P.part, 16], HALVES)
    )
    staging = gl.allocate_shared_memory(outs[0].dtype, [P.staging, P.block_rows, P.part], outs[0].layout)
    bias = epilogues.bias_buffer(ADDED, P)
    row_tiles = gl.cdiv(rows, P.block_rows)
    col_tiles = gl.cdiv(cols, P.block_cols)
    number = FIRST
    first = gl.program_id(0) + FIRST * gl.num_programs(0)
    for index in range(first, row_tiles * col_tiles, P.consumers * gl.num_programs(0)):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row = row_tile * P.block_rows
        col = col_tile * P.block_cols
        if ADDED:  # read before the products, which hide how long it takes
            columns = col + gl.arange(0, P.block_cols, COLUMNS)
            added = gl.load(
                vector_ptr + columns.to(gl.int64) * stride_vector, mask=columns < cols, other=0.0
            ).to(gl.float32)
        if P.tensor_memory:
            acc = tensor_memory.finished(products, number)
        else:
            acc = gl.full([P.block_rows, P.width], 0.0, gl.float32, WHOLE)
            acc = multiply(acc, operands, products, number, steps, FIRST, P)
        if P.inputs:
            await_turn(takings, number, FIRST, P)
        parts = acc if P.tensor_memory else epilogues.split_columns(acc, PIECES, NARROW)
        if P.epilogue == "linear":
            if ADDED:
                bias.store(added)
            epilogues.linear(parts, outs, bias, staging, row, col, NARROW, P)
        elif P.epilogue == "glu":
            epilogues.glu(parts, outs, staging, row, col, NARROW, P)
        elif P.epilogue == "dgrad":
            epilogues.dgrad(
                parts, outs, vector_ptr, inputs, number * P.parts, staging, row, col, rows, cols, NARROW, P
            )
        elif P.epilogue == "wgrad":
            epilogues.wgrad(parts, outs, inputs, number * P.parts, staging, row, col, NARROW, P)
        else:
            epilogues.dglu(parts, outs, inputs, number * P.parts, staging, row, col, NARROW, P)
        if P.inputs:
            give_turn(takings, FIRST, P)
        if P.tensor_memory:
            tensor_memory.give_back(products, number)
        number += P.consumers
    tma.store_wait(0)


def launch_matmul(
    epilogue: Epilogue,
    product: launch.ProductLaunch,
    operands: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor],
    vector: Tensor | None,
    activation: str,
    adds: bool,
) -> None:
    """What `gluon.multiply` does, where it can.

    operands: a, b; of glu a, b, b2; of two pairs a, b, a2, b2
    outputs: those asked for, in the order of the kernel's
    inputs: what the epilogue reads
    vector: the bias of linear, or the sums of dgrad
    adds: whether results are added to what is there, by the copy engine
    """
    a, b = operands[:2]
    consts = constants_of(
        product.tile,
        product.target.shared_memory,
        epilogue,
        activation=activation,
        vector=vector is not None,
        pairs=max(1, len(operands) // 2),
        inputs=len(inputs),
        outputs=len(outputs),
        fast=product.fast,
        itemsize=outputs[0].itemsize,
        adds=adds,
        tensor_memory=product.target.capability == 100,
    )
    a_block, part = (consts.block_rows, consts.block_depth), (consts.block_rows, consts.part)
    b_block = (
        (consts.block_depth, consts.block_cols)
        if consts.depth_first
        else (consts.block_cols, consts.block_depth)
    )
    rows, cols, tile = product.rows, product.cols, product.tile
    halves, alike = halves_of_pair(tile)
    if consts.tensor_memory:  # each block has its half of the columns
        alike = _ACROSS if consts.depth_first else halves
    if consts.across:
        described_a = described(a, a_block[::-1], _ACROSS if tile.blocks == 2 else ())
    else:
        described_a = described(a, a_block, halves)
    described_b = described(b, b_block, alike)
    read = [described(tensor, part, halves) for tensor in inputs]
    written = [described(tensor, part, halves) for tensor in outputs]
    launch.on(a.device, _matmul_kernel, launch.grid(product.target, "descriptor", tile, rows, cols))(
        described_a,
        described_b,
        described(operands[2], a_block, halves) if consts.pairs == 2 else described_a,
        described(operands[-1], b_block, alike) if len(operands) > 2 else described_b,
        *_filled(read, 2, written[0]),
        *_filled(written, 3, written[0]),
        a if vector is None else vector,
        rows,
        cols,
        a.shape[0 if consts.across else 1],
        operands[2].shape[1] if consts.pairs == 2 else 0,
        0 if vector is None else vector.stride(-1),
        P=consts,
        num_warps=tile.num_warps,
        **({"num_ctas": 2} if tile.blocks == 2 else {}),
    )


def halves_of_pair(tile: MatmulTile) -> tuple[Halves, Halves]:
    """How the blocks of a tile have what is split by rows, and what both have."""
    return _OF_PAIR if tile.blocks == 2 else ((), ())


def described(tensor: Tensor, block: tuple[int, int], of_pair: Halves) -> TensorDescriptor:
    """A matrix as this kernel takes it; `block` is what is moved at a time, into both blocks of a pair."""
    strides = [MatrixLayout.of("", tensor).row_pitch, 1]
    layout = _layout(block, tensor.dtype, of_pair)
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(block), layout)


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype, of_pair: Halves) -> gl.NVMMASharedLayout:
    """How a block lies in shared memory: as the copy engine and the tensor cores both take it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype], cga_layout=[*map(list, of_pair)])


def _filled(given: list[TensorDescriptor], count: int, filler: TensorDescriptor) -> list[TensorDescriptor]:
    """`count` arguments, of which those not given are never touched."""
    return given + [filler] * (count - len(given))


_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
