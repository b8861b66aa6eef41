"""The machine computes what kernels compute, and finds what is wrong with them."""

from functools import partial

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

from tests.gate import machine_kernels
from tests.gate.machine_kernels import product, product_kernel
from tpkernels.gate import machine
from tpkernels.gate.accuracy import BOUND, relative_error
from tpkernels.gate.machine import interleavings, program
from tpkernels.gate.machine.steps import Steps
from tpkernels.kernels import launch
from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.target import INTERPRETER, target_of

BLOCK = (64, 64, 64)
ROLES = [pytest.param(False, id="cooperative"), pytest.param(True, id="pingpong")]
EXTRA = [pytest.param(False, id="no_input"), pytest.param(True, id="input")]


def random(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


def recorded(pingpong, extra, stages, steps, tiles):
    """The trace of the one program of a launch."""
    found = []

    def record(kernel, grid, *arguments, **constants):
        found.extend(machine.Launched(kernel, grid, arguments, constants).traces())

    x, w, b, z = random(64 * tiles, 64 * steps), random(64, 64 * steps), random(64), random(64 * tiles, 64)
    product(record, x, w, b, z, BLOCK, stages=stages, pingpong=pingpong, extra=extra, programs=1)
    (trace,) = found
    return trace


def test_triton_does_not_interpret_gluon():
    """Where it does one day, its interpreter may replace `machine.run`."""
    if isinstance(tile_at, InterpretedFunction):
        assert not isinstance(product_kernel, InterpretedFunction), (
            f"Triton {triton.__version__} interprets Gluon"
        )


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("pingpong", ROLES)
@pytest.mark.parametrize("schedule", machine.SCHEDULES.values(), ids=machine.SCHEDULES.keys())
def test_every_schedule_computes_the_product(schedule, pingpong, extra):
    torch.manual_seed(0)
    x, w, b, z = random(136, 136), random(72, 136), random(72), random(136, 72)
    run = partial(machine.run, schedule=schedule)
    y = product(run, x, w, b, z, BLOCK, stages=3, pingpong=pingpong, extra=extra, activation="silu")
    exact = x.double() @ w.double().T + b.double() + (z.double() if extra else 0.0)
    assert relative_error(y, torch.nn.functional.silu(exact)) < BOUND[y.dtype]


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("pingpong", ROLES)
def test_sound_kernel_has_no_fault_in_any_order(pingpong, extra):
    for stages in (1, 2, 3):
        for steps in (1, 2, 3, 4):
            for tiles in (1, 2, 3):
                assert machine.search(recorded(pingpong, extra, stages, steps, tiles)) > 5


def faults_of(trace):
    """Of each mutant of a trace: the kind of fault that the search finds."""
    expected = machine.expectations(trace)
    found = {}
    for mutant in machine.mutants(trace):
        try:
            machine.search(mutant.trace, expected)
            found[mutant.name] = "none"
        except machine.Fault as fault:
            found[mutant.name] = type(fault).__name__
    return found


CAUGHT_AS = {
    "arrive dropped": {"Deadlock"},
    "wait dropped": {"Race", "Misuse"},
    "parity of the first wait wrong": {"Race", "Deadlock"},
    "parity of the last wait wrong": {"Race", "Misuse", "Deadlock"},
    "expects too little": {"Deadlock"},
    "expects too much": {"Deadlock"},
    "expect dropped": {"Deadlock"},
    "copy dropped": {"Deadlock"},
    "store_wait dropped": {"Race", "Undrained"},
    "fence dropped": {"Race"},
    "wait for products dropped": {"Race"},
    "one more arrival at init": {"Deadlock"},
    "released a step early": {"Race"},
}


@pytest.mark.parametrize("pingpong", ROLES)
def test_search_catches_every_mutant(pingpong):
    found = faults_of(recorded(pingpong, True, stages=3, steps=3, tiles=4))
    caught_as = {(name.partition(" (")[0], fault) for name, fault in found.items()}
    assert {(kind, fault) for kind, fault in caught_as if fault not in CAUGHT_AS[kind]} == set()
    assert {kind for kind, _ in caught_as} == set(CAUGHT_AS)


def test_search_by_steps_finds_what_a_search_by_events_finds(monkeypatch):
    """The latter lets any role do any one event, and any copy land, at any time."""
    trace = recorded(True, True, stages=2, steps=1, tiles=3)
    by_steps, states = faults_of(trace), machine.search(trace)
    monkeypatch.setattr(program, "_steps", lambda events: [(at, at + 1) for at in range(len(events))])
    monkeypatch.setattr(Steps, "landing_matters", Steps.landing)
    monkeypatch.setattr(Steps, "private", lambda steps, state: None)
    assert faults_of(trace) == by_steps
    assert machine.search(trace) > 5 * states


SLIPS = {
    "consumers in no order": (
        "mbarrier.wait(order.index(WHICH), (turn // 2 & 1) ^ 1 ^ WHICH)",
        "pass",
        machine.Race,
    ),
    "the second consumer begins at the wrong slot": (
        "step = turn * steps + k\n",
        "step = (turn // CONSUMERS) * steps + k\n",
        machine.Fault,
    ),
    "a slot is released while it is read": (
        "mbarrier.arrive(empty.index((step - LAG) % STAGES), count=1)",
        "mbarrier.arrive(empty.index(step % STAGES), count=1)",
        machine.Fault,
    ),
    "no phase": ("step // STAGES & 1)\n", "0)\n", machine.Fault),
    "the input is never released": (
        "mbarrier.arrive(z_empty.index(z_slot), count=1)",
        "pass",
        machine.Deadlock,
    ),
    "too few bytes": (
        "mbarrier.expect(full.index(slot), x.nbytes_per_cta + w.nbytes_per_cta)",
        "mbarrier.expect(full.index(slot), x.nbytes_per_cta)",
        machine.Fault,
    ),
    "no fence": ("        fence_async_shared()\n", "        pass\n", machine.Race),
    "stores are not waited for": (
        "        tma.store_wait(0)\n        staging",
        "        staging",
        machine.Race,
    ),
}


@pytest.mark.parametrize(("old", "new", "fault"), SLIPS.values(), ids=SLIPS.keys())
def test_search_catches_slips_in_the_source(old, new, fault):
    launched = []
    x, w, b, z = random(320, 128), random(64, 128), random(64), random(320, 64)

    def keep(kernel, grid, *arguments, **constants):
        launched.append(machine.Launched(kernel, grid, arguments, constants))

    product(keep, x, w, b, z, BLOCK, stages=3, pingpong=True, extra=True, programs=1)
    assert launched[0].explore() > 1000
    with machine.edited(machine_kernels, old, new), pytest.raises(fault):
        launched[0].explore()
    assert launched[0].explore() > 1000


def test_edit_of_what_is_not_there_is_refused():
    edited = machine.edited(machine_kernels, "no such line", "")
    with (
        pytest.raises(ValueError, match=r"expected 'no such line' once in tests\.gate\.machine_kernels"),
        edited,
    ):
        pass


def test_emulator_catches_what_its_schedule_meets():
    x, w, b, z = random(64, 256), random(64, 256), random(64), random(64, 64)
    old, new, _ = SLIPS["no phase"]
    run = partial(machine.run, schedule=machine.SCHEDULES["late loads"])
    with (
        machine.edited(machine_kernels, old, new),
        pytest.raises(machine.Race, match=r"after\n  .*goes on at"),
    ):
        product(run, x, w, b, z, BLOCK, stages=2)


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
    tma.async_copy_global_to_shared(x, [-8, 0], landed, buffer)
    if WAITS:
        mbarrier.wait(landed, PARITY)
    staging.store(buffer.load(LAYOUT))
    if FENCES:
        fence_async_shared()
    for _ in range(STORES):
        tma.async_copy_shared_to_global(y, [-8, 0], staging)
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
def _accumulate(x, w, y_ptr, WAITS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    b = gl.allocate_shared_memory(w.dtype, w.block_shape, w.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.expect(landed, x.nbytes_per_cta + w.nbytes_per_cta)
    tma.async_copy_global_to_shared(x, [0, 0], landed, a)
    tma.async_copy_global_to_shared(w, [0, 0], landed, b)
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


def test_launchers_on_the_cpu_reach_the_machine():
    x, w, b, z = random(136, 136), random(72, 136), random(72), random(136, 72)

    def started(kernel, grid, *arguments, **constants):
        assert target_of(x.device).processors == 3
        launch.on(x.device, kernel, grid)(*arguments, **constants)

    with machine.emulating(processors=3) as launched:
        y = product(started, x, w, b, z, BLOCK, stages=2)
    assert [(each.kernel, each.grid) for each in launched] == [(product_kernel, (2,))]
    assert relative_error(y, x.double() @ w.double().T + b.double()) < BOUND[y.dtype]
    if isinstance(tile_at, InterpretedFunction):
        assert target_of(x.device) == INTERPRETER


def test_search_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(interleavings, "MAX_STATES", 100)
    with pytest.raises(ValueError, match="more than 100 states: search smaller sizes"):
        machine.search(recorded(True, True, stages=3, steps=3, tiles=3))
