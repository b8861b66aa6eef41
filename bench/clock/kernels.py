"""Products in Gluon, of the structure whose timings on an H100 are published: see `published`.

c (M, N) = a (M, K) b (K, N), in blocks of (ROWS, COLS) and DEPTH; all are tensor descriptors.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tpkernels.kernels.triton_versions import gluon_copies

async_load, async_store, _ = gluon_copies()


@gluon.jit
def awaited_kernel(a, b, c, MMA: gl.constexpr, BUFFERS: gl.constexpr, num_warps: gl.constexpr):
    """One tile a block; each copy is awaited at once. With two buffers products run during the next copy."""
    ROWS: gl.constexpr = c.block_type.shape[0]
    COLS: gl.constexpr = c.block_type.shape[1]
    DEPTH: gl.constexpr = a.block_type.shape[1]
    a_buffers = gl.allocate_shared_memory(a.dtype, [BUFFERS] + a.block_type.shape, a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [BUFFERS] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * ROWS
    col = gl.program_id(1) * COLS
    acc = warpgroup_mma_init(gl.zeros((ROWS, COLS), dtype=gl.float32, layout=MMA))
    step = 0
    for k in range(0, a.shape[1], DEPTH):
        buffer = step % BUFFERS
        mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
        async_load(a, [row, k], full, a_buffers.index(buffer))
        async_load(b, [k, col], full, b_buffers.index(buffer))
        mbarrier.wait(full, phase=step & 1)
        if BUFFERS > 1:
            acc = warpgroup_mma_wait(0, (acc,))
        acc = warpgroup_mma(a_buffers.index(buffer), b_buffers.index(buffer), acc, is_async=True)
        if BUFFERS == 1:
            acc = warpgroup_mma_init(warpgroup_mma_wait(0, (acc,)))
        step += 1
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.invalidate(full)
    staging = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    staging.store(acc.to(c.dtype))
    fence_async_shared()
    async_store(c, [row, col], staging)
    tma.store_wait(0)


@gluon.jit
def _load(number, a, b, row, col, k, full, a_ring, b_ring, STAGES: gl.constexpr, there):
    place = number % STAGES
    mbarrier.expect(full.index(place), a.block_type.nbytes + b.block_type.nbytes, pred=there)
    async_load(a, [row, k], full.index(place), a_ring.index(place), there)
    async_load(b, [k, col], full.index(place), b_ring.index(place), there)
    return number + 1


@gluon.jit
def _multiply(number, acc, full, a_ring, b_ring, add, STAGES: gl.constexpr):
    place = number % STAGES
    mbarrier.wait(full.index(place), number // STAGES & 1)
    acc = warpgroup_mma_wait(0, (acc,))
    acc = warpgroup_mma(a_ring.index(place), b_ring.index(place), acc, is_async=True, use_acc=add)
    return number + 1, acc


@gluon.jit
def _tile(number, row_tiles, col_tiles, GROUP: gl.constexpr):
    """Row and column of a tile, down the columns, or down GROUP tiles of each column in turn."""
    if GROUP == 0:
        return number % row_tiles, number // row_tiles
    else:
        first_row = number // (GROUP * col_tiles) * GROUP
        here = min(row_tiles - first_row, GROUP)
        return first_row + number % here, number % (GROUP * col_tiles) // here


@gluon.jit
def ring_kernel(
    a,
    b,
    c,
    MMA: gl.constexpr,
    STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
    GROUP: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Copies run ahead in a ring of buffers. One tile a block; or a share of all, in a row or by groups."""
    ROWS: gl.constexpr = c.block_type.shape[0]
    COLS: gl.constexpr = c.block_type.shape[1]
    DEPTH: gl.constexpr = a.block_type.shape[1]
    AHEAD: gl.constexpr = STAGES - 2
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    loaded = 0
    multiplied = 0
    acc = warpgroup_mma_init(gl.zeros((ROWS, COLS), dtype=gl.float32, layout=MMA))
    row_tiles = gl.cdiv(c.shape[0], ROWS)
    col_tiles = gl.cdiv(c.shape[1], COLS)
    tiles = row_tiles * col_tiles
    first = gl.program_id(0)
    every = 1
    count = 1
    if not PERSISTENT:
        first = gl.program_id(1) * row_tiles + gl.program_id(0)
    elif GROUP == 0:
        share = gl.cdiv(tiles, gl.num_programs(0))
        first = first * share
        count = min(first + share, tiles) - first
    else:
        every = gl.num_programs(0)
        count = gl.cdiv(tiles - first, every)
    for i in range(count):
        row_tile, col_tile = _tile(first + i * every, row_tiles, col_tiles, GROUP)
        row = row_tile * ROWS
        col = col_tile * COLS
        # within the loop, so that what is stored may take their place
        a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
        b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
        for k in gl.static_range(0, DEPTH * AHEAD, DEPTH):
            loaded = _load(loaded, a, b, row, col, k, full, a_ring, b_ring, STAGES, True)
        add = False
        for k in range(DEPTH * AHEAD, a.shape[1], DEPTH):
            loaded = _load(loaded, a, b, row, col, k, full, a_ring, b_ring, STAGES, True)
            multiplied, acc = _multiply(multiplied, acc, full, a_ring, b_ring, add, STAGES)
            add = True
        for _ in gl.static_range(AHEAD):
            multiplied, acc = _multiply(multiplied, acc, full, a_ring, b_ring, add, STAGES)
        result = warpgroup_mma_wait(0, (acc,))
        staging = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
        staging.store(result.to(c.dtype))
        fence_async_shared()
        async_store(c, [row, col], staging)
        tma.store_wait(0)


@gluon.jit
def rotated_kernel(a, b, c, MMA: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):
    """A share of all tiles in a row; the next tile's first copies start before a tile is stored."""
    ROWS: gl.constexpr = c.block_type.shape[0]
    COLS: gl.constexpr = c.block_type.shape[1]
    DEPTH: gl.constexpr = a.block_type.shape[1]
    AHEAD: gl.constexpr = STAGES - 1
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    staging = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    loaded = 0
    multiplied = 0
    acc = warpgroup_mma_init(gl.zeros((ROWS, COLS), dtype=gl.float32, layout=MMA))
    row_tiles = gl.cdiv(c.shape[0], ROWS)
    tiles = row_tiles * gl.cdiv(c.shape[1], COLS)
    share = gl.cdiv(tiles, gl.num_programs(0))
    tile = gl.program_id(0) * share
    count = min(tile + share, tiles) - tile
    row = tile % row_tiles * ROWS
    col = tile // row_tiles * COLS
    for k in gl.static_range(0, DEPTH * AHEAD, DEPTH):
        loaded = _load(loaded, a, b, row, col, k, full, a_ring, b_ring, STAGES, True)
    for i in range(count):
        multiplied, acc = _multiply(multiplied, acc, full, a_ring, b_ring, False, STAGES)
        for k in range(DEPTH * AHEAD, a.shape[1], DEPTH):
            loaded = _load(loaded, a, b, row, col, k, full, a_ring, b_ring, STAGES, True)
            multiplied, acc = _multiply(multiplied, acc, full, a_ring, b_ring, True, STAGES)
        done_row = row
        done_col = col
        tile += 1
        row = tile % row_tiles * ROWS
        col = tile // row_tiles * COLS
        more = i + 1 < count
        for k in gl.static_range(0, DEPTH * (AHEAD - 1), DEPTH):
            loaded = _load(loaded, a, b, row, col, k, full, a_ring, b_ring, STAGES, more)
            multiplied, acc = _multiply(multiplied, acc, full, a_ring, b_ring, True, STAGES)
        loaded = _load(loaded, a, b, row, col, DEPTH * (AHEAD - 1), full, a_ring, b_ring, STAGES, more)
        result = warpgroup_mma_wait(0, (acc,))
        tma.store_wait(0)
        staging.store(result.to(c.dtype))
        fence_async_shared()
        async_store(c, [done_row, done_col], staging)
    tma.store_wait(0)
