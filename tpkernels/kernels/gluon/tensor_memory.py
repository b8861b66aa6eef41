"""Roles on Blackwell, whose tensor cores keep sums in a memory of their own: what differs from `roles`.

Two blocks, a pair, multiply together. Each has its half of the rows of a and of the columns of b in shared
memory, and all columns of the sums of its rows. One warp of the first block starts the products of both:

    full     lies in the first block, which alone waits: the copies into both blocks have landed
    empty    in each block: the tensor cores arrive when the products so far are complete (commit)

Sums have two places, a ring that `multiply` fills and the consumers of both blocks empty a part at a time:
a tile is stored during the products of the next.

    done     in each block: the tensor cores arrive after the last product of a tile
    unread   in the first block: no warp of either block reads the sums any more, each block arrives once

Triton allocates tensor memory before the roles begin, and frees it after the blocks have met at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tpkernels.kernels.gluon.roles import barriers, barriers_of_both, place_of, weights_of

PLACES = gl.constexpr(2)  # of sums: all columns of tensor memory, if a tile has 256


@gluon.jit
def sum_ring(P: gl.constexpr):
    """Places for the sums of a tile; nothing where registers hold them."""
    if P.tensor_memory:
        WIDTH: gl.constexpr = P.block_cols  # of one product
        LAYOUT: gl.constexpr = TensorMemoryLayout(
            [P.block_rows // 2, WIDTH], col_stride=1, cga_layout=[[1, 0]], two_ctas=True
        )
        sums = allocate_tensor_memory(gl.float32, [PLACES, P.block_rows, P.width], LAYOUT)
        return sums, barriers(PLACES), barriers_of_both(PLACES)
    else:
        return ()


@gluon.jit
def multiply(operands, sums, rows, cols, steps, P: gl.constexpr):
    """Have the products of every tile of this program computed."""
    STAGES: gl.constexpr = P.stages
    a_ring, b_ring, full, empty, _ = operands
    places, done, unread = sums
    use = 0
    number = 0
    tiles = gl.cdiv(rows, P.block_rows) * gl.cdiv(cols, P.block_cols)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        place, turn = place_of(number, PLACES)
        acc = places.index(place)
        mbarrier.wait(unread.index(place), turn ^ 1)
        for step in range(steps):
            buffer, phase = place_of(use, STAGES)
            a = a_ring.index(buffer).permute((1, 0)) if P.across else a_ring.index(buffer)
            mbarrier.wait(full.index(buffer), phase)
            first, second = weights_of(b_ring, buffer, P)
            if P.two_weights:
                left = acc.slice(0, P.block_cols, dim=1)
                right = acc.slice(P.block_cols, P.block_cols, dim=1)
                tcgen05_mma(a, first.permute((1, 0)), left, use_acc=step > 0, mbarriers=[])
                tcgen05_mma(a, second.permute((1, 0)), right, use_acc=step > 0, mbarriers=[])
            else:
                b = first if P.depth_first else first.permute((1, 0))
                tcgen05_mma(a, b, acc, use_acc=step > 0, mbarriers=[])
            tcgen05_commit(empty.index(buffer))
            use += 1
        tcgen05_commit(done.index(place))
        number += 1  # noqa: SIM113


@gluon.jit
def finished(sums, number):
    """The sums of this program's tile of that number, once they are complete."""
    places, done, _ = sums
    place, turn = place_of(number, PLACES)
    mbarrier.wait(done.index(place), turn)
    return places.index(place)


@gluon.jit
def give_back(sums, number):
    """Let `multiply` use the place of a tile's sums again."""
    _, _, unread = sums
    place, _ = place_of(number, PLACES)
    mbarrier.arrive(unread.index(place))
