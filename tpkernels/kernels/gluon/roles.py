"""The roles of a program's warps up to the finished product, and how they tell each other.

A ring is a few buffers in shared memory, each with two barriers:

    full     the copies into the buffer have landed: completed by their bytes
    empty    nobody reads it any more: completed by whoever did

Use number n of a ring takes buffer n % size. Its barriers complete once a turn, so their phase is the parity
of the turn. Who fills a buffer waits for `empty` of the turn before, which the first turn finds completed.

    load       one warp fills the ring of operands, a step of depth at a time
    fetch      one warp fills the ring of what epilogues read, a part of a tile at a time
    multiply   the warps of a consumer empty the ring of operands into an accumulator
    take       the same warps take a part out of the ring of inputs

Two consumers take the tiles of a program in turn; uses are counted over all of its tiles. A phase cannot be
told from the one after the next, so nobody may wait for a use before the turn before it has been seen to be
complete: consumers multiply in turn, and take inputs in turn. Each has a barrier for that, which the other
completes.

In a pair of blocks each has both rings, and its `load` fills them with its half of the rows. What both
multiply by is loaded once, by `load` of the first block, into a buffer of each, and counts at `full` of each.
So every buffer of operands has one more barrier, which lies in the first block:

    both       nobody in either block reads the buffer any more: each block arrives once

These bytes may land before the second block expects them, but only in the phase for which it will: it arrived
at `both` after the phase before was complete. No block may begin before the barriers of the other are made,
nor end while the other can still arrive there. They wait for each other: at the end as the kernel says, and
before the roles begin as Triton adds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.triton_versions import gluon_copies

async_load, _, _ = gluon_copies()


@gluon.jit
def place_of(use, SIZE: gl.constexpr):
    """(buffer, phase) of a use of a ring."""
    return use % SIZE, (use // SIZE) & 1


@gluon.jit
def barriers(SIZE: gl.constexpr, COUNT: gl.constexpr = 1):
    """A barrier for each buffer of a ring in each block, completed by COUNT arrivals."""
    BLOCKS: gl.constexpr = gl.num_ctas()
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout([[1]] if BLOCKS == 2 else [])
    made = gl.allocate_shared_memory(gl.int64, [SIZE, BLOCKS], LAYOUT)
    for i in gl.static_range(SIZE):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def barriers_of_both(SIZE: gl.constexpr, COUNT: gl.constexpr = 1):
    """A barrier for each buffer of a ring, for both blocks of a pair: it lies in the first. Else nothing."""
    if gl.num_ctas() == 2:
        made = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout([[0]]))
        for i in gl.static_range(SIZE):
            mbarrier.init(made.index(i), count=COUNT)  # of each block
        return made
    else:
        return ()


@gluon.jit
def turn_barriers(P: gl.constexpr):
    """Two barriers for the consumers' turns to multiply, and two for those to take inputs.

    None where nobody waits: the compiler would give their memory to another buffer.
    """
    if P.consumers == 2 and P.inputs:
        return barriers(2), barriers(2)
    elif P.consumers == 2:
        return barriers(2), ()
    else:
        return (), ()


@gluon.jit
def operand_ring(a, b, P: gl.constexpr):
    """Buffers for blocks of a, and for those of b, or of both weights."""
    STAGES: gl.constexpr = P.stages
    A_ROWS: gl.constexpr = P.block_depth if P.across else P.block_rows
    A_COLS: gl.constexpr = P.block_rows if P.across else P.block_depth
    APART: gl.constexpr = P.two_weights and P.tensor_memory  # each weight is multiplied by itself
    WIDTH: gl.constexpr = P.block_cols if APART else P.width
    B_ROWS: gl.constexpr = P.block_depth if P.depth_first else WIDTH
    B_COLS: gl.constexpr = WIDTH if P.depth_first else P.block_depth
    B_BUFFERS: gl.constexpr = 2 * STAGES if APART else STAGES
    a_ring = gl.allocate_shared_memory(a.dtype, [P.stages, A_ROWS, A_COLS], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [B_BUFFERS, B_ROWS, B_COLS], b.layout)
    if P.tensor_memory:
        return a_ring, b_ring, barriers_of_both(STAGES), barriers(STAGES), ()
    else:
        return a_ring, b_ring, barriers(STAGES), barriers(STAGES), barriers_of_both(STAGES)


@gluon.jit
def weights_of(b_ring, buffer, P: gl.constexpr):
    """Where a weight lies in a buffer, and where a second one does; one alone twice."""
    if P.two_weights and P.tensor_memory:
        return b_ring.index(2 * buffer), b_ring.index(2 * buffer + 1)
    elif P.two_weights:
        both = b_ring.index(buffer)
        return both.slice(0, P.block_cols), both.slice(P.block_cols, P.block_cols)
    else:
        return b_ring.index(buffer), b_ring.index(buffer)


@gluon.jit
def input_ring(in0, P: gl.constexpr):
    """Buffers for parts of what the epilogue reads, in1 behind in0; nothing if it reads nothing."""
    SLOTS: gl.constexpr = P.slots
    if P.inputs:
        parts = gl.allocate_shared_memory(in0.dtype, [P.slots * P.inputs, P.block_rows, P.part], in0.layout)
        return parts, barriers(SLOTS), barriers(SLOTS)
    else:
        return ()


@gluon.jit
def load(a, b, a2, b2, operands, rows, cols, depth, depth2, P: gl.constexpr):
    """Fill the ring of operands for every tile of this program."""
    GROUP: gl.constexpr = P.group
    row_tiles = gl.cdiv(rows, P.block_rows)
    col_tiles = gl.cdiv(cols, P.block_cols)
    use = 0
    for index in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row = row_tile * P.block_rows
        col = col_tile * P.block_cols
        for k in range(0, depth, P.block_depth):
            load_step(a, b, b2, operands, use, row, col, k, P)
            use += 1
        if P.pairs == 2:
            for k in range(0, depth2, P.block_depth):
                load_step(a2, b2, b2, operands, use, row, col, k, P)
                use += 1
    if P.tensor_memory:  # the tensor cores still tell this block of what they have read
        STAGES: gl.constexpr = P.stages
        for n in range(STAGES):
            buffer, phase = place_of(use + n, STAGES)
            mbarrier.wait(operands[3].index(buffer), phase ^ 1)


@gluon.jit
def load_step(a, b, beside, operands, use, row, col, k, P: gl.constexpr):
    """Fill a buffer with what is multiplied at depth k; a second weight comes behind b."""
    STAGES: gl.constexpr = P.stages
    PAIR: gl.constexpr = P.blocks == 2 and not P.tensor_memory
    a_ring, b_ring, full, empty, both = operands
    buffer, phase = place_of(use, STAGES)
    landed = full.index(buffer)
    weight, behind = weights_of(b_ring, buffer, P)
    mbarrier.wait(empty.index(buffer), phase ^ 1)
    if P.two_weights:
        mbarrier.expect(landed, a.nbytes_per_cta + b.nbytes_per_cta + beside.nbytes_per_cta)
    else:
        mbarrier.expect(landed, a.nbytes_per_cta + b.nbytes_per_cta)
    if PAIR:  # its own rows do not wait for the other block
        async_load(a, [k, row] if P.across else [row, k], landed, a_ring.index(buffer))
        mbarrier.wait(both.index(buffer), phase ^ 1)
    if P.two_weights:
        async_load(b, [col, k], landed, weight, multicast=PAIR)
        async_load(beside, [col, k], landed, behind, multicast=PAIR)
    else:
        async_load(b, [k, col] if P.depth_first else [col, k], landed, weight, multicast=PAIR)
    if not PAIR:
        async_load(a, [k, row] if P.across else [row, k], landed, a_ring.index(buffer))


@gluon.jit
def fetch(in0, in1, inputs, rows, cols, P: gl.constexpr):
    """Fill the ring of what epilogues read for every tile of this program; in1 lies behind in0."""
    SLOTS: gl.constexpr = P.slots
    GROUP: gl.constexpr = P.group
    if P.inputs:
        buffers, full, empty = inputs
        row_tiles = gl.cdiv(rows, P.block_rows)
        col_tiles = gl.cdiv(cols, P.block_cols)
        use = 0
        for index in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
            row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
            row = row_tile * P.block_rows
            for p in range(P.parts):
                col = col_tile * P.block_cols + p * P.part
                buffer, phase = place_of(use, SLOTS)
                landed = full.index(buffer)
                mbarrier.wait(empty.index(buffer), phase ^ 1)
                mbarrier.expect(landed, P.inputs * in0.nbytes_per_cta)
                async_load(in0, [row, col], landed, buffers.index(buffer * P.inputs))
                if P.inputs == 2:
                    async_load(in1, [row, col], landed, buffers.index(buffer * P.inputs + 1))
                use += 1


@gluon.jit
def await_turn(turns, tile, FIRST: gl.constexpr, P: gl.constexpr):
    """Let the other consumer finish its tile; there is none before the program's first."""
    if P.consumers == 2:
        mbarrier.wait(turns.index(FIRST), ((tile // 2) & 1) ^ (1 - FIRST))


@gluon.jit
def give_turn(turns, FIRST: gl.constexpr, P: gl.constexpr):
    """Let the other consumer begin its tile."""
    if P.consumers == 2:
        mbarrier.arrive(turns.index(1 - FIRST))


@gluon.jit
def multiply(acc, operands, turns, tile, steps, FIRST: gl.constexpr, P: gl.constexpr):
    """acc plus the products of all steps of a tile.

    A product stays in flight while the next is issued, so its buffer is released a step later. The last one
    still is while the other consumer begins to multiply.
    """
    STAGES: gl.constexpr = P.stages
    a_ring, b_ring, full, empty, both = operands
    await_turn(turns, tile, FIRST, P)
    use = tile * steps
    for step in range(steps):
        buffer, phase = place_of(use + step, STAGES)
        block = a_ring.index(buffer).permute((1, 0)) if P.across else a_ring.index(buffer)
        weight = b_ring.index(buffer) if P.depth_first else b_ring.index(buffer).permute((1, 0))
        mbarrier.wait(full.index(buffer), phase)
        acc = warpgroup_mma(block, weight, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        before, _ = place_of(use + step + STAGES - 1, STAGES)
        release(empty, both, before, step > 0)
    give_turn(turns, FIRST, P)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    last, _ = place_of(use + steps + STAGES - 1, STAGES)
    release(empty, both, last, True)
    return acc


@gluon.jit
def release(empty, both, buffer, pred):
    """Let `load` fill a buffer of operands again: this block's, and the first block's of a pair."""
    mbarrier.arrive(empty.index(buffer), pred=pred)
    if gl.num_ctas() == 2:
        mbarrier.arrive(both.index(buffer), pred=pred)


@gluon.jit
def take(inputs, use, LAYOUT: gl.constexpr, P: gl.constexpr):
    """The blocks of a use of the ring of inputs, in fp32; the first twice if there is but one."""
    SLOTS: gl.constexpr = P.slots
    buffers, full, empty = inputs
    buffer, phase = place_of(use, SLOTS)
    mbarrier.wait(full.index(buffer), phase)
    first = buffers.index(buffer * P.inputs).load(LAYOUT)
    second = first
    if P.inputs == 2:
        second = buffers.index(buffer * P.inputs + 1).load(LAYOUT)
    fence_async_shared()  # the copy engine fills the buffer again, and is ordered after no plain load without
    mbarrier.arrive(empty.index(buffer))
    return first.to(gl.float32), second.to(gl.float32)
