"""Device helpers that every matmul kernel shares: the order of tiles, and blocks in either form.

A block is read and written through one of two forms. In the descriptor form (`TMA`) the operand is a host
tensor descriptor, which knows sizes and strides, clips at the edges and moves blocks by the copy engine. In
the pointer form it is a pointer with any strides, and edges are masked here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpkernels.kernels.interpret import mend

mend()


@triton.jit
def tile_at(index, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Tile number `index` in an order that walks down GROUP rows before it steps to the next column.

    Neighbours in time then share operand blocks, which the L2 cache holds.
    """
    per_group = GROUP * col_tiles
    first_row = index // per_group * GROUP
    rows_here = tl.minimum(row_tiles - first_row, GROUP)
    within = index % per_group
    return first_row + within % rows_here, within // rows_here


@triton.jit
def load_block(
    source,
    row,
    col,
    rows,
    cols,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The (ROWS, COLS) block at (row, col) of a (rows, cols) matrix; zero beyond its edges."""
    if TMA:
        return source.load([row, col])
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        # int64: rows * cols passes 2**31 at 512k tokens of width 4096
        offsets = r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col
        return tl.load(source + offsets, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)


@triton.jit
def load_weight(
    w,
    col,
    depth,
    cols,
    depths,
    stride_col,
    stride_depth,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
    TMA: tl.constexpr,
):
    """A (DEPTH, COLS) block of a weight, which is (cols, depths), or (depths, cols) if DEPTH_FIRST."""
    if DEPTH_FIRST:
        return load_block(w, depth, col, depths, cols, stride_depth, stride_col, DEPTH, COLS, TMA)
    else:
        return load_block(w, col, depth, cols, depths, stride_col, stride_depth, COLS, DEPTH, TMA).T


@triton.jit
def add_products(
    acc,  # (ROWS, COLS) of fp32
    a,  # (rows, depth)
    w,  # (cols, depth), or (depth, cols) if DEPTH_FIRST
    row,
    col,
    rows,
    cols,
    depth,
    stride_row,
    stride_a_depth,
    stride_col,
    stride_w_depth,
    DEPTH_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """acc plus the block of a wᵀ at (row, col), over all of the depth: the loop of every product."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    for k in range(0, depth, BLOCK_DEPTH):
        a_block = load_block(a, row, k, rows, depth, stride_row, stride_a_depth, ROWS, BLOCK_DEPTH, TMA)
        w_block = load_weight(
            w, col, k, cols, depth, stride_col, stride_w_depth, COLS, BLOCK_DEPTH, DEPTH_FIRST, TMA
        )
        acc = tl.dot(a_block, w_block, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_block(target, value, row, col, rows, cols, stride_row, stride_col, TMA: tl.constexpr):
    """Write a block at (row, col) of a (rows, cols) matrix, in its dtype; nothing beyond its edges."""
    if TMA:
        target.store([row, col], value.to(target.dtype))
    else:
        r = row + tl.arange(0, value.shape[0])
        c = col + tl.arange(0, value.shape[1])
        offsets = r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col
        mask = (r < rows)[:, None] & (c < cols)[None, :]
        tl.store(target + offsets, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(source, start, length, stride, SIZE: tl.constexpr):
    """SIZE elements of a vector from `start`, as fp32; zero beyond its end."""
    i = start + tl.arange(0, SIZE)
    return tl.load(source + i.to(tl.int64) * stride, mask=i < length, other=0.0).to(tl.float32)


@triton.jit
def split_columns(block, PARTS: tl.constexpr):
    """A block as a tuple of PARTS (a power of two) narrower ones, left to right.

    An epilogue that works on one part at a time needs fewer registers, and a smaller staging buffer.
    """
    if PARTS == 1:
        return (block,)
    else:
        halves = tl.reshape(block, (block.shape[0], 2, block.shape[1] // 2))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        return split_columns(left, PARTS // 2) + split_columns(right, PARTS // 2)
