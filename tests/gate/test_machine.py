"""The machine on small kernels: each rule that it holds them to, broken."""

import pytest
import torch
import triton
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
from triton.runtime.interpreter import InterpretedFunction

from tpkernels.gate import machine
from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.triton_versions import gluon_copies

async_load, async_store, _ = gluon_copies()


def random(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


@gluon.jit
def _copy_kernel(
    x,
    y,
    COUNT: gl.constexpr,
    ARRIVALS: gl.constexpr,
    BYTES: gl.constexpr,
    PARITY: gl.constexpr,
    WAITS: gl.constexpr,
    FENCES: gl.constexpr,
    STORES: gl.constexpr,
    DRAINS: gl.constexpr,
):
    """x copied to y by way of shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    buffer = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    staging = gl.allocate_shared_memory(y.dtype, y.block_shape, y.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=COUNT)
    mbarrier.wait(landed, 1)  # which a fresh barrier passes
    for _ in range(ARRIVALS):
        mbarrier.arrive(landed, count=1)
    mbarrier.expect(landed, BYTES)
    async_load(x, [-8, 0], landed, buffer)
    if WAITS:
        mbarrier.wait(landed, PARITY)
    staging.store(buffer.load(LAYOUT))
    if FENCES:
        fence_async_shared()
    for _ in range(STORES):
        async_store(y, [-8, 0], staging)
    if DRAINS:
        tma.store_wait(0)
    mbarrier.invalidate(landed)


SOUND = {
    "COUNT": 1,
    "ARRIVALS": 0,
    "BYTES": 8192,
    "PARITY": 0,
    "WAITS": True,
    "FENCES": True,
    "STORES": 1,
    "DRAINS": True,
}


def copied(launch, x, **other):
    y = torch.full_like(x, float("nan"))
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    described = [TensorDescriptor(t, list(t.shape), list(t.stride()), [64, 64], layout) for t in (x, y)]
    launch(_copy_kernel, (1,), *described, **(SOUND | other))
    return y


def test_boxes_are_clipped():
    x = random(40, 56)
    y = copied(machine.run, x)
    assert torch.equal(y, x)  # rows -8 to 55 of 40, columns 0 to 63 of 56
    y = copied(machine.run, random(72, 64))
    assert y[:56].isfinite().all()
    assert y[56:].isnan().all()


RULES = {
    "wrong parity": (
        {"PARITY": 1},
        machine.Deadlock,
        "main waits at .* for landed, parity 1, which misses 1 of",
    ),
    "no wait": ({"WAITS": False}, machine.Race, "reads buffer before the copy of .* has landed"),
    "too many bytes": (
        {"BYTES": 8200},
        machine.Deadlock,
        "landed, parity 0, which misses .* 8 bytes in phase 0",
    ),
    "too few bytes": ({"BYTES": 8000}, machine.Deadlock, "misses 0 of 1 arrivals and -192 bytes in phase 0"),
    "more bytes than fit": ({"BYTES": 2**20}, machine.Misuse, "at most 1048575 bytes, not 1048576"),
    "an arrival is missing": ({"COUNT": 2}, machine.Deadlock, "misses 1 of 2 arrivals and 0 bytes"),
    "an arrival too many": (
        {"ARRIVALS": 1},
        machine.Deadlock,
        "misses 1 of 1 arrivals and 0 bytes in phase 2",
    ),
    "no fence": ({"FENCES": False}, machine.Race, "no fence after the stores of main"),
    "store in flight at the end": ({"DRAINS": False}, machine.Undrained, "main ends with the TMA store of"),
}


@pytest.mark.parametrize(("other", "fault", "message"), RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("way", [machine.run, machine.explore], ids=["run", "explore"])
def test_broken_rule_is_told(way, other, fault, message):
    copied(way, random(64, 64))
    with pytest.raises(fault, match=message):
        copied(way, random(64, 64), **other)


def test_writing_twice_is_told():
    with pytest.raises(machine.Misuse, match="writes global memory that this launch has written before"):
        copied(machine.run, random(64, 64), STORES=2)


@gluon.jit
def _refill_kernel(x, y, FENCES: gl.constexpr):
    """Two boxes of x copied to y by way of one buffer."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    buffer = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    for row in gl.static_range(2):
        mbarrier.expect(landed, x.nbytes_per_cta)
        async_load(x, [64 * row, 0], landed, buffer)
        mbarrier.wait(landed, row)
        value = buffer.load(LAYOUT)
        if FENCES:
            fence_async_shared()
        gl.store(y + 64 * row * 64 + gl.arange(0, 64)[:, None] * 64 + gl.arange(0, 64)[None, :], value)
    mbarrier.invalidate(landed)


@pytest.mark.parametrize("way", [machine.run, machine.explore], ids=["run", "explore"])
def test_what_was_loaded_is_fenced_before_a_copy_fills_the_buffer_again(way):
    x, y = random(128, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    described = TensorDescriptor(x, [128, 64], [64, 1], [64, 64], layout)
    way(_refill_kernel, (1,), described, y, FENCES=True)
    if way is machine.run:
        assert torch.equal(y, x)
    with pytest.raises(machine.Race, match=r"no fence between the loads of main and this copy"):
        way(_refill_kernel, (1,), described, torch.zeros_like(y), FENCES=False)


@gluon.jit
def _accumulate(x, w, y_ptr, WAITS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    b = gl.allocate_shared_memory(w.dtype, w.block_shape, w.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.expect(landed, x.nbytes_per_cta + w.nbytes_per_cta)
    async_load(x, [0, 0], landed, a)
    async_load(w, [0, 0], landed, b)
    mbarrier.wait(landed, 0)
    acc = warpgroup_mma_init(gl.zeros((64, 64), gl.float32, LAYOUT))
    acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0 if WAITS else 1, deps=(acc,))
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    gl.store(y_ptr + rows[:, None] * 64 + cols[None, :], acc + 1.0)


def test_accumulator_in_flight_is_not_used():
    x, y = random(64, 64), torch.full((64, 64), float("nan"))
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    described = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout)
    machine.run(_accumulate, (1,), described, described, y, WAITS=True)
    torch.testing.assert_close(y, x.float() @ x.float().T + 1)
    with pytest.raises(machine.Misuse, match="uses an accumulator that a product in flight still writes"):
        machine.run(_accumulate, (1,), described, described, y, WAITS=False)


@gluon.jit
def _nothing():
    pass


@gluon.jit
def _specialize(REGISTERS: gl.constexpr):
    gl.warp_specialize([(_nothing, ()), (_nothing, ())], [1], [REGISTERS])


@pytest.mark.parametrize("registers", [20, 25, 264])
def test_registers_that_hardware_does_not_give_are_refused(registers):
    assert machine.explore(_specialize, (1,), REGISTERS=24) == 1
    with pytest.raises(machine.Misuse, match="setmaxnreg takes multiples of 8 from 24 to 256"):
        machine.explore(_specialize, (1,), REGISTERS=registers)


def test_triton_does_not_interpret_gluon():
    """Where it does one day, its interpreter may replace `machine.run`."""
    if isinstance(tile_at, InterpretedFunction):
        assert not isinstance(_copy_kernel, InterpretedFunction), (
            f"Triton {triton.__version__} interprets Gluon"
        )
