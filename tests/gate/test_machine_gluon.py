"""The warp-specialised products in the machine: under its schedules, searched in all orders, and broken."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import getsource

import pytest
import torch

from tests.gate.planted import edited, faults_of, named
from tpkernels.gate import machine, numerics
from tpkernels.gate.machine import orders, program
from tpkernels.gate.machine.steps import Steps
from tpkernels.gate.numerics import Frames, NumericCase, RandomOperands, examine
from tpkernels.gate.recording import primitive
from tpkernels.kernels.matmul_tile import MatmulTile, compiles

# the same rows a warp as what is shipped, fewer columns
TILES = {
    "cooperative": MatmulTile(128, 64, 64, num_warps=8, num_stages=3, parts=2, consumers=1),
    "pingpong": MatmulTile(64, 64, 64, num_warps=4, num_stages=3, parts=2, consumers=2),
}
ROLES = pytest.mark.parametrize("roles", TILES)

pytestmark = pytest.mark.skipif(
    not compiles(TILES["cooperative"]), reason="tiles with consumers need Triton 3.7 or later"
)


def launched(name, roles, stages, steps, tiles, into=None):
    """The launch of a primitive whose one program computes so many tiles."""
    shape = TILES[roles]
    tile = MatmulTile(
        shape.block_rows, 64, 64, shape.num_warps, stages, parts=2, consumers=shape.consumers, group=1
    )
    rows, depth, cols = tiles * tile.block_rows, 64 * steps, 64
    sizes = (rows, depth, cols) if name.startswith("d") else (rows, cols, depth)
    sizes = (depth, rows, cols) if name.startswith("wgrad") else sizes
    of = RandomOperands(*sizes, torch.bfloat16, form="descriptor", tile=tile)
    with machine.emulating(None, processors=1) as launches:
        primitive(of, name, activation="gelu", into=into)
    (one,) = launches
    return one


@ROLES
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["linear", "dglu"])
def test_no_order_of_events_is_a_fault(name, stages, roles):
    for steps in (1, 2, 3, 4):
        for tiles in (1, 2, 3):
            assert launched(name, roles, stages, steps, tiles).explore() > 5


@ROLES
@pytest.mark.parametrize("name", ["glu", "dgrad", "dgrad_act", "dgrad_pairs"])
def test_no_order_of_events_of_other_epilogues_is_a_fault(name, roles):
    assert launched(name, roles, stages=2, steps=2, tiles=3).explore() > 5


@ROLES
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["wgrad", "wgrad_accumulate_"])
def test_no_order_of_events_of_weight_gradients_is_a_fault(name, into, roles):
    for stages, steps, tiles in ((2, 1, 3), (2, 3, 2), (3, 2, 3)):
        assert launched(name, roles, stages, steps, tiles, into).explore() > 5


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


MUTATED = {
    "linear": ("linear", None),
    "dglu": ("dglu", None),
    "+=bf16": ("wgrad_accumulate_", torch.bfloat16),
    "+=fp32": ("wgrad_accumulate_", torch.float32),
}


@ROLES
@pytest.mark.parametrize(("name", "into"), MUTATED.values(), ids=MUTATED)
def test_every_mutant_is_caught(name, into, roles):
    missed, seen = None, set()
    for stages, steps in ((2, 1), (3, 2), (2, 3)):  # an edit may change nothing where another wait holds, too
        (trace,) = launched(name, roles, stages, steps, 5, into).traces()
        found = faults_of(trace, named(trace, missed))
        missed = {mutant for mutant, fault in found.items() if fault == "none"}
        seen |= {(mutant.partition(" (")[0], fault) for mutant, fault in found.items() if fault != "none"}
    assert missed == set()
    assert {(kind, fault) for kind, fault in seen if fault not in CAUGHT_AS[kind]} == set()
    assert {kind for kind, _ in seen} == set(CAUGHT_AS)


OF_WGRAD = {  # module, what stands there, what does not belong there, main_grad's dtype, what is found
    "overwritten": (
        *("epilogues", "async_add(out, [row, col], buffer)", "async_store(out, [row, col], buffer)"),
        *(torch.float32, "is off by"),
    ),
    "added twice": (
        *("epilogues", "        async_add(out, [row, col], buffer)\n"),
        "        async_add(out, [row, col], buffer)\n        async_add(out, [row, col], buffer)\n",
        *(torch.float32, "writes global memory that this launch has written before"),
    ),
    "old values dropped": (
        *("epilogues", "            value += old\n", "            pass\n"),
        *(torch.bfloat16, "is off by"),
    ),
    "staged while the copy engine still adds": (
        *("epilogues", "    tma.store_wait(P.staging - 1)\n", "    pass\n"),
        *(torch.float32, "Race: "),
    ),
    "added without a fence": (
        *("epilogues", "    fence_async_shared()\n    if P.adds", "    if P.adds"),
        *(torch.float32, "Race: "),
    ),
    "left while the copy engine adds": (
        *("matmul", "    tma.store_wait(0)\n", "    pass\n"),
        *(torch.float32, "Undrained: "),
    ),
    "added a part beside": (
        *(
            "epilogues",
            "leave(dw, value, row, col + p * P.part",
            "leave(dw, value, row, col + p * P.part + 1",
        ),
        *(torch.float32, "is off by"),
    ),
}


@pytest.mark.parametrize(("module", "old", "new", "into", "found"), OF_WGRAD.values(), ids=OF_WGRAD)
def test_edit_of_a_weight_gradient_is_caught(module, old, new, into, found):
    of = RandomOperands(136, 264, 72, torch.bfloat16, form="descriptor", tile=TILES["cooperative"])
    run = partial(primitive, of, "wgrad_accumulate_", into=into)
    case = NumericCase("+=", partial(numerics._emulated, run, machine.EAGER, explores=False))
    assert examine(case, Frames()).failure == ""
    with edited(import_module(f"tpkernels.kernels.gluon.{module}"), old, new):
        assert found in examine(case, Frames()).failure


def test_search_by_steps_finds_what_a_search_by_events_finds(monkeypatch):
    """The latter lets any role do any one event, and any copy land, at any time."""
    (trace,) = launched("linear", "pingpong", stages=2, steps=1, tiles=3).traces()
    by_steps, states = faults_of(trace, named(trace)), machine.search(trace)
    assert states == 69  # with more, copies land where that changes nothing; with fewer, not where it does
    monkeypatch.setattr(program, "_steps", lambda events: [(at, at + 1) for at in range(len(events))])
    monkeypatch.setattr(Steps, "landing_matters", Steps.landing)
    monkeypatch.setattr(Steps, "private", lambda steps, state: None)
    assert faults_of(trace, named(trace)) == by_steps
    assert machine.search(trace) > 5 * states


def test_search_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(orders, "MAX_STATES", 100)
    with pytest.raises(ValueError, match="more than 100 states: search smaller sizes"):
        launched("dglu", "pingpong", stages=3, steps=3, tiles=3).explore()


SLIPS = {  # what stands there, what does not belong there
    "a product is not waited for": (
        "roles",
        "warpgroup_mma_wait(1, deps=(acc,",
        "warpgroup_mma_wait(2, deps=(acc,",
    ),
    "stores are not waited for": ("epilogues", "    tma.store_wait(P.staging - 1)\n", "    pass\n"),
}


@pytest.mark.parametrize(("module", "old", "new"), SLIPS.values(), ids=SLIPS)
def test_emulator_catches_what_its_schedule_meets(module, old, new):
    of = RandomOperands(128, 128, 320, torch.bfloat16, form="descriptor", tile=TILES["cooperative"])
    with (
        edited(import_module(f"tpkernels.kernels.gluon.{module}"), old, new),
        machine.emulating(machine.SCHEDULES["late loads"], processors=1),
        pytest.raises(machine.Race, match=r"after\n  .*goes on at"),
    ):
        primitive(of, "linear")


@ROLES
def test_inputs_that_are_released_without_a_fence_are_caught(roles):
    """Without it the copy engine may fill a buffer that is still read."""
    from tpkernels.kernels.gluon import roles as source

    fence = next(line for line in getsource(source).splitlines() if "fence_async_shared()" in line)
    with (
        edited(source, fence + "\n", ""),
        pytest.raises(machine.Race, match=r"no fence between the loads of consume \d and this copy"),
    ):
        launched("dglu", roles, stages=2, steps=1, tiles=3).explore()


def test_staging_that_is_no_part_of_the_stores_of_a_tile_is_caught(monkeypatch):
    from tpkernels.kernels.gluon import matmul

    shipped = matmul.constants_of
    monkeypatch.setattr(matmul, "constants_of", lambda *of, **more: replace(shipped(*of, **more), staging=4))
    with pytest.raises(machine.Race, match="staging"):  # a tile has six stores
        launched("glu", "cooperative", stages=2, steps=1, tiles=2).explore()


def test_gate_computes_every_shipped_tile_and_reports_what_is_wrong():
    names = [case.name for case in numerics.cases() if "-c" in case.name]
    assert {name.partition("/")[0] for name in names} == {
        "linear_fwd",
        "glu_fwd",
        "dgrad",
        "dgrad_act",
        "dgrad_pairs",
        "dglu",
        "scaled_linear_fwd",
        "wgrad",
        "wgrad_accumulate_",
    }
    from tpkernels.kernels.gluon import epilogues

    case = next(
        case for case in numerics.cases() if case.name == next(name for name in names if "glu" in name)
    )
    assert examine(case, Frames()).failure == ""
    with edited(epilogues, "act(gate, ACTIVATION, FAST) * up", "act(gate, ACTIVATION, FAST) + up"):
        assert "h is off by" in examine(case, Frames()).failure
    idle = NumericCase("idle", partial(numerics._emulated, dict, machine.EAGER, explores=False))
    assert examine(idle, Frames()).failure == "RuntimeError: launched no Gluon kernel"
