"""Pairs of blocks in the machine: what they compute, all orders of their events, and what breaks them.

Compiling them takes Triton 3.9; the machine needs only the names that 3.7 has, too.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch

from tests.gate.planted import edited, faults_of
from tpkernels.gate import machine, numerics
from tpkernels.gate.machine.events import (
    Arrive,
    CopyIn,
    Expect,
    Init,
    MultiplyWait,
    Role,
    Trace,
    TraceEvent,
    Wait,
)
from tpkernels.gate.numerics import Frames, NumericCase, RandomOperands, examine
from tpkernels.gate.recording import primitive
from tpkernels.kernels import dgrad, matmul_tile
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.matmul_tile import MatmulTile, compiles
from tpkernels.kernels.tiles import serves

PAIR = MatmulTile(256, 64, 64, num_warps=8, num_stages=3, parts=2, consumers=1, blocks=2)

pytestmark = pytest.mark.skipif(
    not compiles(replace(PAIR, blocks=1)), reason="tiles with consumers need Triton 3.7 or later"
)


@pytest.fixture(autouse=True)
def pairs_compile(monkeypatch):
    monkeypatch.setattr(matmul_tile, "triton_version", lambda: (3, 9))


def launched(stages, steps, tiles):
    """The launch of a product without epilogue: one pair computes so many tiles."""
    tile = replace(PAIR, num_stages=stages, parts=1, group=1)
    of = RandomOperands(tiles * 256, 64, 64 * steps, torch.bfloat16, form="descriptor", tile=tile)
    with machine.emulating(None, processors=2) as launches:
        primitive(of, "linear", bias=False, activation="none", keep_z=False)
    (one,) = launches
    return one


def launched_as(name, stages, steps, tiles):
    """The same of a weight gradient that is added to fp32, or of a gradient with that of its bias."""
    tile, rows, depth = replace(PAIR, num_stages=stages, parts=1, group=1), tiles * 256, 64 * steps
    sizes = (depth, rows) if name == "wgrad_accumulate_" else (rows, depth)
    of = RandomOperands(*sizes, 64, torch.bfloat16, form="descriptor", tile=tile)
    with machine.emulating(None, processors=2) as launches:
        primitive(of, name, activation="relu2", into=torch.float32 if name == "wgrad_accumulate_" else None)
    return launches[0]


def matrix(rows, cols, scale=1.0):
    return (torch.randn(rows, cols) * scale).bfloat16()


@pytest.mark.parametrize(
    ("rows", "cols", "depth"),
    [(392, 72, 128), (256, 64, 64), (5, 64, 320), (130, 200, 136)],
    ids=["two tiles of rows", "one tile", "second block outside", "ragged"],
)
@pytest.mark.parametrize("schedule", machine.SCHEDULES)
def test_pair_agrees_with_float64(rows, cols, depth, schedule):
    x, w, bias = matrix(rows, depth), matrix(cols, depth, 0.1), matrix(1, cols)[0]
    with machine.emulating(machine.SCHEDULES[schedule], processors=4) as launches:
        y, z = linear_fwd(x, w, bias, activation="relu2", keep_z=True, tile=PAIR)
    exact = x.double() @ w.double().T + bias.double()
    torch.testing.assert_close(z.double(), exact, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(y.double(), exact.clamp(min=0) ** 2, rtol=2**-8, atol=1e-4)
    assert launches[0].grid == (min(2, PAIR.tiles(rows, cols)),)  # pairs, which take two processors each


@pytest.mark.parametrize(
    ("stages", "steps", "tiles"), [(2, 1, 1), (2, 3, 1), (2, 1, 3), (3, 2, 1), (2, 2, 2)]
)
def test_no_order_of_events_of_both_blocks_is_a_fault(stages, steps, tiles):
    assert launched(stages, steps, tiles).explore() > 800


@pytest.mark.parametrize("name", ["wgrad_accumulate_", "dgrad_act"])
def test_no_order_of_events_of_other_pairs_is_a_fault(name):
    for stages, steps, tiles in ((2, 3, 1), (2, 1, 2)):
        assert launched_as(name, stages, steps, tiles).explore() > 800


@pytest.mark.parametrize(
    "name", ["glu", "dgrad", "dgrad_act", "dgrad_pairs", "dglu", "wgrad", "wgrad_accumulate_"]
)
def test_pairs_of_other_products_agree_with_float64(name):
    rows = (72, 264) if name.startswith("wgrad") else (264, 72)
    of = RandomOperands(*rows, 136, torch.bfloat16, form="descriptor", tile=PAIR)
    for case, schedule in zip(numerics._product(of, name, "pair"), machine.SCHEDULES.values(), strict=False):
        run = partial(numerics._emulated, case.run, schedule, explores=False)
        assert examine(NumericCase(case.name, run), Frames()).failure == ""


@pytest.mark.parametrize("rows", [100, 264, 512])
def test_each_block_of_a_pair_sums_its_own_rows(rows, monkeypatch):
    """In a row of its own, of zeros where all of its rows lie outside."""
    dy, w, z = matrix(rows, 64), matrix(64, 72, 0.1), matrix(rows, 72)
    seen = []
    monkeypatch.setattr(dgrad, "sum_partials", lambda partials, out: seen.append(partials.clone()))
    with machine.emulating(machine.SCHEDULES["late loads"], processors=4):
        dgrad.dgrad_act(dy, w, z, "relu2", bias_grad=True, tile=PAIR)
    dz = dy.double() @ w.double() * 2 * z.double().clamp(min=0)
    blocks = [dz[start : start + 128].sum(0) for start in range(0, -(-rows // 256) * 256, 128)]
    torch.testing.assert_close(seen[0].double(), torch.stack(blocks), rtol=1e-5, atol=1e-4)
    assert serves("dgrad", PAIR, ("relu2", "db"))


def test_rows_of_sums_that_blocks_share_are_caught():
    of = RandomOperands(264, 72, 136, torch.bfloat16, form="descriptor", tile=PAIR)
    one_row = "row // P.block_rows * 2 + 0 *", "row // P.block_rows * 2 +"
    with (
        edited(import_module("tpkernels.kernels.gluon.epilogues"), *one_row[::-1]),
        machine.emulating(),
        pytest.raises(machine.Misuse, match="writes global memory that this launch has written before"),
    ):
        primitive(of, "dgrad_act", activation="relu2")


def test_launch_says_which_triton_a_pair_needs(monkeypatch):
    monkeypatch.setattr(matmul_tile, "triton_version", lambda: (3, 8))
    with machine.emulating(), pytest.raises(ValueError, match=r"-b2 expected Triton 3\.9 or later"):
        linear_fwd(matrix(64, 64), matrix(64, 64), tile=PAIR)


Edit = Callable[[Role, TraceEvent], list[TraceEvent]]


def of_block(block: int) -> Callable[[Role], bool]:
    return lambda role: role.name.endswith(f"block {block}")


FIRST, SECOND = of_block(0), of_block(1)


def rewritten(trace: Trace, edit: Edit) -> Trace:
    roles = (
        Role(role.name, tuple(made for event in role.events for made in edit(role, event)))
        for role in trace.segments[0]
    )
    return replace(trace, segments=(tuple(roles),))


def mutants_of_pairs(trace: Trace) -> Iterator[tuple[str, Trace]]:
    names = trace.barriers
    both = {n for n, name in enumerate(names) if name.startswith("made#3")}
    full = {n for n, name in enumerate(names) if name.startswith("made of")}
    meeting = names.index("the blocks of the pair")
    assert len(full) == 2 * len(both) == 4
    second_full = {n for n in full if trace.block_of[n] == 1}
    weights = {  # that the first block copies into the second
        event.number
        for role in trace.segments[0]
        for event in role.events
        if isinstance(event, CopyIn) and FIRST(role) and event.barrier in second_full
    }
    assert weights

    def dropping(which: Callable[[Role, TraceEvent], bool]) -> Trace:
        return rewritten(trace, lambda role, event: [] if which(role, event) else [event])

    def at(kind: type[TraceEvent], barriers: set[int]) -> Callable[[TraceEvent], bool]:
        return lambda event: isinstance(event, kind) and event.barrier in barriers

    def changing(which: Callable[[Role, TraceEvent], bool], **fields) -> Trace:
        return rewritten(
            trace, lambda role, event: [replace(event, **fields) if which(role, event) else event]
        )

    arrives, waits = at(Arrive, both), at(Wait, both)
    yield "one release for two", changing(lambda role, event: at(Init, both)(event), count=1)
    yield "a third release", changing(lambda role, event: at(Init, both)(event), count=3)
    yield "the second block releases its own buffer only", dropping(lambda r, e: SECOND(r) and arrives(e))
    yield "the first block releases its own buffer only", dropping(lambda r, e: FIRST(r) and arrives(e))
    yield "the first block does not wait for the second", dropping(lambda r, e: waits(e))
    yield (
        "phase of the wait for both wrong",
        rewritten(
            trace, lambda role, event: [replace(event, parity=1 - event.parity) if waits(event) else event]
        ),
    )
    yield "mask without the second block", dropping(lambda r, e: e.number in weights)
    yield (
        "mask without the first block",
        dropping(
            lambda r, e: (
                FIRST(r) and isinstance(e, CopyIn) and "b_ring" in e.view.name and e.number not in weights
            )
        ),
    )
    yield "both blocks copy for both", rewritten(trace, copied_by_second(trace, weights))
    yield "bytes for half", rewritten(trace, expecting(lambda role: True, 1 / 2))
    yield "bytes for half in the second block", rewritten(trace, expecting(SECOND, 1 / 2))
    yield "bytes of both blocks", rewritten(trace, expecting(lambda role: True, 2))
    yield "nobody waits at the end", dropping(last_meeting(trace, meeting, lambda role: True))
    yield (
        "the first block does not wait at the end",
        dropping(lambda r, e: isinstance(e, Wait) and last_meeting(trace, meeting, FIRST)(r, e)),
    )
    yield "nobody waits at the beginning", dropping(first_meeting(trace, meeting))
    yield "barriers of both made in each block", dropping(lambda r, e: at(Init, both)(e))
    yield "released before it was read", rewritten(trace, released_early(both))
    yield (
        "the second block leaves out what lies outside",
        dropping(
            lambda r, e: (
                SECOND(r) and not r.name.startswith("main") and not isinstance(e, Init) and e.where != "roles"
            )
        ),
    )
    yield "counted at the other's barrier", rewritten(trace, counted_at(trace, weights))


def expecting(which: Callable[[Role], bool], share: float) -> Edit:
    return lambda role, event: [
        replace(event, nbytes=int(event.nbytes * share))
        if isinstance(event, Expect) and which(role)
        else event
    ]


def copied_by_second(trace: Trace, weights: set[int]) -> Edit:
    """`load` of the second block copies what the first does, too."""
    copies = {
        index: event
        for index, event in enumerate(
            event for role in trace.segments[0] for event in role.events if event.number in weights
        )
    }
    counts = {"n": 0}
    numbers = max(event.number for role in trace.segments[0] for event in role.events) + 1

    def edit(role: Role, event: TraceEvent) -> list[TraceEvent]:
        if SECOND(role) and isinstance(event, CopyIn):
            again = replace(copies[counts["n"]], number=numbers + counts["n"])
            counts["n"] += 1
            return [event, again]
        return [event]

    return edit


def meetings(trace: Trace, meeting: int, which: Callable[[Role], bool]) -> list[list[TraceEvent]]:
    return [
        [event for event in role.events if getattr(event, "barrier", None) == meeting]
        for role in trace.segments[0]
        if which(role) and role.name.startswith("main")
    ]


def last_meeting(trace: Trace, meeting: int, which: Callable[[Role], bool]):
    chosen = {event for events in meetings(trace, meeting, which) for event in events[-2:]}
    return lambda role, event: event in chosen


def first_meeting(trace: Trace, meeting: int):
    """The one before the roles begin; those at the end then meet in the phase before."""
    every = meetings(trace, meeting, lambda role: True)
    chosen = {event for events in every for event in events[:2]}
    return lambda role, event: event in chosen


def released_early(both: set[int]) -> Edit:
    """A release of both comes before the wait for the products that read the buffer."""
    held: dict[str, list[TraceEvent]] = {}

    def edit(role: Role, event: TraceEvent) -> list[TraceEvent]:
        waiting = held.setdefault(role.name, [])
        if isinstance(event, MultiplyWait):
            later = [one for one in releases(role, both) if one.number > event.number]
            if later and later[0] not in waiting:
                waiting.append(later[0])
                return [later[0], event]
        return [] if event in waiting else [event]

    return edit


def releases(role: Role, both: set[int]) -> list[TraceEvent]:
    return [event for event in role.events if isinstance(event, Arrive) and event.barrier in both]


def counted_at(trace: Trace, weights: set[int]) -> Edit:
    """Bytes that land in the second block count in the first."""
    names = trace.barriers

    def edit(role: Role, event: TraceEvent) -> list[TraceEvent]:
        if event.number in weights and isinstance(event, CopyIn):
            other = names.index(names[event.barrier].replace("of block 1", "of block 0"))
            return [replace(event, barrier=other)]
        return [event]

    return edit


CAUGHT_AS = {
    "one release for two": {"Race", "Misuse", "Deadlock"},
    "a third release": {"Deadlock"},
    "the second block releases its own buffer only": {"Deadlock"},
    "the first block releases its own buffer only": {"Deadlock"},
    "the first block does not wait for the second": {"Race"},
    "phase of the wait for both wrong": {"Deadlock", "Race"},
    "mask without the second block": {"Deadlock"},
    "mask without the first block": {"Deadlock"},
    "both blocks copy for both": {"Race", "Undrained", "Misuse", "Deadlock"},
    "bytes for half": {"Race", "Misuse", "Deadlock"},
    "bytes for half in the second block": {"Race", "Misuse", "Deadlock"},
    "bytes of both blocks": {"Deadlock"},
    "nobody waits at the end": {"Misuse", "Undrained"},
    "the first block does not wait at the end": {"Misuse", "Undrained"},
    "nobody waits at the beginning": {"Misuse", "Deadlock"},
    "barriers of both made in each block": {"Misuse"},
    "released before it was read": {"Race"},
    "the second block leaves out what lies outside": {"Deadlock"},
    "counted at the other's barrier": {"Deadlock", "Race", "Misuse"},
}


@pytest.mark.parametrize("name", ["linear", "wgrad_accumulate_"])
def test_every_mutant_of_a_pair_is_caught(name):
    one = launched if name == "linear" else partial(launched_as, name)
    (trace,) = one(stages=2, steps=3, tiles=1).traces()
    found = faults_of(trace, mutants_of_pairs(trace))
    assert {name: fault for name, fault in found.items() if fault not in CAUGHT_AS[name]} == {}
    assert found.keys() == CAUGHT_AS.keys()


SLIPS = {  # what stands there, what does not belong there
    "a block ends alone": ("matmul", "        gl.barrier(cluster=True)\n", "        pass\n", machine.Misuse),
    "only its own block is told": (
        "roles",
        "mbarrier.arrive(both.index(buffer), pred=pred)",
        "pass",
        machine.Deadlock,
    ),
    "nobody waits for both": ("roles", "mbarrier.wait(both.index(buffer), phase ^ 1)", "pass", machine.Race),
}


@pytest.mark.parametrize(("module", "old", "new", "fault"), SLIPS.values(), ids=SLIPS)
def test_edit_of_the_source_is_caught(module, old, new, fault):
    with edited(import_module(f"tpkernels.kernels.gluon.{module}"), old, new):
        one = launched(stages=2, steps=3, tiles=1)
        with pytest.raises(fault):
            one.explore()
