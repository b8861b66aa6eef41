"""What a consumer does with a finished product, a part of its columns after the other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tpkernels.kernels.epilogues import act, act_and_grad
from tpkernels.kernels.gluon.roles import take
from tpkernels.kernels.triton_versions import gluon_copies

_, async_store, async_add = gluon_copies()


@gluon.jit
def bias_buffer(ADDED: gl.constexpr, P: gl.constexpr):
    """Shared memory for the bias of a tile, if it is added."""
    if ADDED:
        ALIKE: gl.constexpr = [[0]] if P.blocks == 2 else []
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=ALIKE)
        return gl.allocate_shared_memory(gl.float32, [P.block_cols], LAYOUT)
    else:
        return ()


@gluon.jit
def linear(parts, outs, bias, staging, row, col, LAYOUT: gl.constexpr, P: gl.constexpr):
    """y = act(x wᵀ + b), and z before the activation if it is kept.

    bias: a buffer of the tile's columns, unread unless there is one
    """
    PARTS: gl.constexpr = P.parts
    ACTIVATION: gl.constexpr = P.activation
    FAST: gl.constexpr = P.fast
    y, z, _ = outs
    for p in gl.static_range(PARTS):
        value = part_of(parts, p, LAYOUT, P)
        if P.vector:
            value += bias.slice(p * P.part, P.part).load(gl.SliceLayout(0, LAYOUT))[None, :]
        if P.outputs == 2:
            leave(z, value, row, col + p * P.part, staging, 2 * p, P)
        result = act(value, ACTIVATION, FAST)
        leave(y, result, row, col + p * P.part, staging, P.outputs * (p + 1) - 1, P)


@gluon.jit
def glu(parts, outs, staging, row, col, LAYOUT: gl.constexpr, P: gl.constexpr):
    """h = f(g) u, and g and u if they are kept."""
    PARTS: gl.constexpr = P.parts
    ACTIVATION: gl.constexpr = P.activation
    FAST: gl.constexpr = P.fast
    h, g, u = outs
    for p in gl.static_range(PARTS):
        gate, up = part_of(parts, p, LAYOUT, P), part_of(parts, P.parts + p, LAYOUT, P)
        if P.outputs == 3:
            leave(g, gate, row, col + p * P.part, staging, 3 * p, P)
            leave(u, up, row, col + p * P.part, staging, 3 * p + 1, P)
        result = act(gate, ACTIVATION, FAST) * up
        leave(h, result, row, col + p * P.part, staging, P.outputs * (p + 1) - 1, P)


@gluon.jit
def dgrad(
    parts, outs, sums_ptr, inputs, use, staging, row, col, rows, cols, LAYOUT: gl.constexpr, P: gl.constexpr
):
    """dx, or dz = dx f'(z); on request the sums of the tile's rows, into their row of a matrix of sums."""
    PARTS: gl.constexpr = P.parts
    ACTIVATION: gl.constexpr = P.activation
    FAST: gl.constexpr = P.fast
    dx, _, _ = outs
    for p in gl.static_range(PARTS):
        value = part_of(parts, p, LAYOUT, P)
        if P.inputs:
            z, _ = take(inputs, use + p, LAYOUT, P)
            _, slope = act_and_grad(z, ACTIVATION, FAST)
            value *= slope
        if P.vector:
            # rows past the end are 0 * w, which is NaN where w is infinite
            there = row + gl.arange(0, P.block_rows, gl.SliceLayout(1, LAYOUT)) < rows
            counted = gl.where(there[:, None], value, 0.0)
            if P.blocks == 2:
                sums_of_blocks(counted, sums_ptr, row, col + p * P.part, cols, P)
            else:
                sums = gl.sum(counted, axis=0)
                columns = col + p * P.part + gl.arange(0, P.part, gl.SliceLayout(0, LAYOUT))
                offset = (row // P.block_rows).to(gl.int64) * cols
                gl.store(sums_ptr + offset + columns, sums, mask=columns < cols)
        leave(dx, value, row, col + p * P.part, staging, p, P)


@gluon.jit
def sums_of_blocks(value, sums_ptr, row, col, cols, P: gl.constexpr):
    """Of a pair: the sums over each block's rows, in a row of their own."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0], [[1, 0]])
    sums = gl.sum(value.reshape([2, P.block_rows // 2, P.part]), axis=1)
    block = row // P.block_rows * 2 + gl.arange(0, 2, gl.SliceLayout(1, LAYOUT))
    columns = col + gl.arange(0, P.part, gl.SliceLayout(0, LAYOUT))
    places = sums_ptr + block.to(gl.int64)[:, None] * cols + columns[None, :]
    gl.store(places, gl.convert_layout(sums, LAYOUT), mask=(columns < cols)[None, :])


@gluon.jit
def dglu(parts, outs, inputs, use, staging, row, col, LAYOUT: gl.constexpr, P: gl.constexpr):
    """dg = dh u f'(g) and du = dh f(g), and h = f(g) u if it is emitted."""
    PARTS: gl.constexpr = P.parts
    ACTIVATION: gl.constexpr = P.activation
    FAST: gl.constexpr = P.fast
    dg, du, h = outs
    for p in gl.static_range(PARTS):
        gate, up = take(inputs, use + p, LAYOUT, P)
        value, slope = act_and_grad(gate, ACTIVATION, FAST)
        dh = part_of(parts, p, LAYOUT, P)
        leave(dg, dh * up * slope, row, col + p * P.part, staging, P.outputs * p, P)
        leave(du, dh * value, row, col + p * P.part, staging, P.outputs * p + 1, P)
        if P.outputs == 3:
            leave(h, value * up, row, col + p * P.part, staging, 3 * p + 2, P)


@gluon.jit
def wgrad(parts, outs, inputs, use, staging, row, col, LAYOUT: gl.constexpr, P: gl.constexpr):
    """dw, or main_grad plus dw: added to what was fetched of it, unless the copy engine adds."""
    PARTS: gl.constexpr = P.parts
    dw, _, _ = outs
    for p in gl.static_range(PARTS):
        value = part_of(parts, p, LAYOUT, P)
        if P.inputs:
            old, _ = take(inputs, use + p, LAYOUT, P)
            value += old
        leave(dw, value, row, col + p * P.part, staging, p, P)


@gluon.jit
def leave(out, value, row, col, staging, number: gl.constexpr, P: gl.constexpr):
    """Store or add a part by way of a staging buffer, as store number `number` of the tile.

    Buffers are used in turn: this one is free once all stores but the `staging` - 1 latest have read theirs.
    """
    tma.store_wait(P.staging - 1)
    buffer = staging.index(number % P.staging)
    buffer.store(value.to(out.dtype))
    fence_async_shared()
    if P.adds:
        async_add(out, [row, col], buffer)
    else:
        async_store(out, [row, col], buffer)


@gluon.jit
def part_of(parts, number: gl.constexpr, LAYOUT: gl.constexpr, P: gl.constexpr):
    """A part of the product: in registers already, or read from tensor memory now."""
    if P.tensor_memory:
        return parts.slice(number * P.part, P.part, dim=1).load(LAYOUT)
    else:
        return parts[number]


@gluon.jit
def split_columns(block, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """A block as PARTS narrower ones, left to right, each in LAYOUT: no value leaves its thread."""
    if PARTS == 1:
        return (gl.convert_layout(block, LAYOUT, assert_trivial=True),)
    else:
        halves = block.reshape([block.shape[0], 2, block.shape[1] // 2]).permute([0, 2, 1])
        left, right = gl.split(halves)
        return split_columns(left, PARTS // 2, LAYOUT) + split_columns(right, PARTS // 2, LAYOUT)
