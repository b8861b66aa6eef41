"""Small warp-specialised products y = act(x wᵀ + b + z): what the machine's tests run.

PINGPONG: two roles multiply tiles in turn; otherwise one does. EXTRA: z is fetched for the epilogue.
"""

import torch
import triton
import triton.language as tl
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.epilogues import act


@gluon.jit
def _load_step(x, w, row, col, k, x_ring, w_ring, full, empty, step, STAGES: gl.constexpr):
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), x.nbytes_per_cta + w.nbytes_per_cta)
    tma.async_copy_global_to_shared(x, [row, k], full.index(slot), x_ring.index(slot))
    tma.async_copy_global_to_shared(w, [col, k], full.index(slot), w_ring.index(slot))


@gluon.jit
def _producer(
    operands, rings, barriers, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr, EXTRA: gl.constexpr
):
    x, w, z = operands
    x_ring, w_ring, z_ring = rings
    full, empty, z_full, z_empty, _ = barriers
    row_tiles, col_tiles, K = sizes
    step = 0
    turn = 0
    for index in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row = row_tile * x.block_shape[0]
        col = col_tile * w.block_shape[0]
        for k in range(0, K, x.block_shape[1]):
            _load_step(x, w, row, col, k, x_ring, w_ring, full, empty, step, STAGES)
            step += 1
        if EXTRA:
            slot = turn % z_ring.shape[0]
            mbarrier.wait(z_empty.index(slot), (turn // z_ring.shape[0] & 1) ^ 1)
            mbarrier.expect(z_full.index(slot), z.nbytes_per_cta)
            tma.async_copy_global_to_shared(z, [row, col], z_full.index(slot), z_ring.index(slot))
        turn += 1  # noqa: SIM113  # Triton has no enumerate


@gluon.jit
def _consumer(
    operands,
    rings,
    barriers,
    sizes,
    staging,
    WHICH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EXTRA: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    b_ptr, y = operands
    x_ring, w_ring, z_ring = rings
    full, empty, z_full, z_empty, order = barriers
    row_tiles, col_tiles, K, N = sizes
    ROWS: gl.constexpr = x_ring.shape[1]
    COLS: gl.constexpr = w_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    LAG: gl.constexpr = 1 if STAGES > 1 else 0  # products in flight when a slot is released
    steps = gl.cdiv(K, x_ring.shape[2])
    turn = WHICH
    for index in range(
        gl.program_id(0) + WHICH * gl.num_programs(0), row_tiles * col_tiles, CONSUMERS * gl.num_programs(0)
    ):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        col = col_tile * COLS
        acc = warpgroup_mma_init(gl.zeros((ROWS, COLS), gl.float32, LAYOUT))
        if CONSUMERS == 2:  # else a wait for a slot that comes round twice meets the parity of the first time
            mbarrier.wait(order.index(WHICH), (turn // 2 & 1) ^ 1 ^ WHICH)
        for k in range(steps):
            step = turn * steps + k
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            acc = warpgroup_mma(x_ring.index(slot), w_ring.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(LAG, deps=(acc,))
            if k >= LAG:
                mbarrier.arrive(empty.index((step - LAG) % STAGES), count=1)
        value = acc
        if LAG:
            value = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((turn * steps + steps - 1) % STAGES), count=1)
        if CONSUMERS == 2:
            mbarrier.arrive(order.index(1 - WHICH), count=1)
        cols = col + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
        value += gl.load(b_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
        if EXTRA:
            z_slot = turn % z_ring.shape[0]
            mbarrier.wait(z_full.index(z_slot), turn // z_ring.shape[0] & 1)
            value += z_ring.index(z_slot).load(LAYOUT).to(gl.float32)
            mbarrier.arrive(z_empty.index(z_slot), count=1)
        tma.store_wait(0)
        staging.index(WHICH).store(act(value, ACTIVATION, False).to(y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [row_tile * ROWS, col], staging.index(WHICH))
        turn += CONSUMERS
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    x,
    w,
    b_ptr,
    z,
    y,
    T,
    N,
    K,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EXTRA: gl.constexpr,
    PINGPONG: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    CONSUMERS: gl.constexpr = 2 if PINGPONG else 1
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_shape[0], x.block_shape[1]], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_shape[0], w.block_shape[1]], w.layout)
    z_ring = gl.allocate_shared_memory(z.dtype, [CONSUMERS, z.block_shape[0], z.block_shape[1]], z.layout)
    staging = gl.allocate_shared_memory(y.dtype, [CONSUMERS, y.block_shape[0], y.block_shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    z_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    z_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(z_full.index(i), count=1)
        mbarrier.init(z_empty.index(i), count=1)
    rings = (x_ring, w_ring, z_ring)
    barriers = (full, empty, z_full, z_empty, order)
    row_tiles = tl.cdiv(T, x.block_shape[0])
    col_tiles = tl.cdiv(N, w.block_shape[0])
    sizes = (row_tiles, col_tiles, K, N)
    first = ((b_ptr, y), rings, barriers, sizes, staging, 0, CONSUMERS, STAGES, GROUP, EXTRA, ACTIVATION)
    loads = ((x, w, z), rings, barriers, (row_tiles, col_tiles, K), STAGES, GROUP, EXTRA)
    if PINGPONG:
        second = ((b_ptr, y), rings, barriers, sizes, staging, 1, CONSUMERS, STAGES, GROUP, EXTRA, ACTIVATION)
        gl.warp_specialize([(_consumer, first), (_consumer, second), (_producer, loads)], [4, 1], [232, 24])
    else:
        gl.warp_specialize([(_consumer, first), (_producer, loads)], [1], [24])
    for i in gl.static_range(2):
        mbarrier.invalidate(order.index(i))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(empty.index(i))
    for i in gl.static_range(CONSUMERS):
        mbarrier.invalidate(z_full.index(i))
        mbarrier.invalidate(z_empty.index(i))


def product(launch, x, w, b, z, block, *, stages, pingpong=False, extra=False, activation="none", programs=2):
    """y = act(x wᵀ + b + z), of z only if extra; `launch(kernel, grid, *arguments, **constants)` runs it."""
    (T, K), N = x.shape, w.shape[0]
    rows, cols, depth = block
    y = torch.full((T, N), float("nan"), dtype=x.dtype)

    def descriptor(tensor, shape):
        layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(shape), layout)

    tiles = triton.cdiv(T, rows) * triton.cdiv(N, cols)
    launch(
        product_kernel,
        (min(programs, tiles),),
        descriptor(x, (rows, depth)),
        descriptor(w, (cols, depth)),
        b,
        descriptor(z, (rows, cols)),
        descriptor(y, (rows, cols)),
        T,
        N,
        K,
        STAGES=stages,
        GROUP=2,
        EXTRA=extra,
        PINGPONG=pingpong,
        ACTIVATION=activation,
        num_warps=4,
    )
    return y
