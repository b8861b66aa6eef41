"""A small warp-specialised kernel for tests of the gate: y = (x wᵀ) u, a row of tiles a program.

A warp loads x and w into a ring of two stages, and u beside it; eight warps multiply and store. Tests compile
it, nothing launches it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STAGES = gl.constexpr(2)


@gluon.jit
def _load(x, w, u, tiles, K, xs, ws, us, full, empty, u_full, u_empty):
    rows: gl.constexpr = x.block_shape[0]
    depth: gl.constexpr = x.block_shape[1]
    step = 0
    for tile in range(tiles):
        for k in range(0, K, depth):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [tile * rows, k], full.index(slot), xs.index(slot))
            tma.async_copy_global_to_shared(w, [0, k], full.index(slot), ws.index(slot))
            step += 1
        mbarrier.wait(u_empty, (tile & 1) ^ 1)
        mbarrier.expect(u_full, u.block_type.nbytes)
        tma.async_copy_global_to_shared(u, [tile * rows, 0], u_full, us)


@gluon.jit
def _multiply(u, y, tiles, K, xs, ws, us, ys, full, empty, u_full, u_empty):
    rows: gl.constexpr = y.block_shape[0]
    cols: gl.constexpr = y.block_shape[1]
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, cols, 16]
    )
    step = 0
    for tile in range(tiles):
        acc = gl.zeros((rows, cols), gl.float32, layout)
        for k in range(0, K, xs.shape[2]):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            product = warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(product,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        mbarrier.wait(u_full, tile & 1)
        out = (acc * us.load(layout).to(gl.float32)).to(gl.bfloat16)
        mbarrier.arrive(u_empty)
        tma.store_wait(1)
        staged = ys.index(tile & 1)
        staged.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [tile * rows, 0], staged)
    tma.store_wait(0)


@gluon.jit
def ring_kernel(x, w, u, y, tiles, K):
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, x.block_shape[0], x.block_shape[1]], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, w.block_shape[0], w.block_shape[1]], w.layout)
    us = gl.allocate_shared_memory(gl.bfloat16, u.block_shape, u.layout)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, y.block_shape[0], y.block_shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    u_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    u_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(u_full, count=1)
    mbarrier.init(u_empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (u, y, tiles, K, xs, ws, us, ys, full, empty, u_full, u_empty)),
            (_load, (x, w, u, tiles, K, xs, ws, us, full, empty, u_full, u_empty)),
        ],
        [1],
        [24],
    )
