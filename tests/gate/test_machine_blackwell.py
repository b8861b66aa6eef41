"""Pairs that multiply together on Blackwell, in the machine: values, all orders of events, mutants."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from tests.gate.planted import edited, faults_of
from tests.gate.test_machine_pairs import FIRST, PAIR, SECOND, last_meeting, matrix, rewritten
from tpkernels.gate import machine, numerics
from tpkernels.gate.machine.blackwell import TensorMemoryLayout, allocate_tensor_memory
from tpkernels.gate.machine.events import (
    Arrive,
    Commit,
    CopyIn,
    Expect,
    Init,
    Load,
    TensorMultiply,
    Trace,
    Wait,
)
from tpkernels.gate.machine.recorder import Recorder, recording
from tpkernels.gate.machine.steps import Steps
from tpkernels.gate.numerics import Frames, NumericCase, RandomOperands, examine
from tpkernels.gate.recording import primitive
from tpkernels.kernels import matmul_tile
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.matmul_tile import compiles

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
    with machine.emulating(None, processors=2, capability=100) as launches:
        primitive(of, "linear", bias=False, activation="none", keep_z=False)
    (one,) = launches
    return one


@pytest.mark.parametrize(("rows", "cols", "depth"), [(392, 72, 128), (5, 64, 320), (130, 200, 136)])
@pytest.mark.parametrize("schedule", machine.SCHEDULES)
def test_pair_agrees_with_float64(rows, cols, depth, schedule):
    x, w, bias = matrix(rows, depth), matrix(cols, depth, 0.1), matrix(1, cols)[0]
    with machine.emulating(machine.SCHEDULES[schedule], processors=2, capability=100):
        y, z = linear_fwd(x, w, bias, activation="relu2", keep_z=True, tile=PAIR)
    exact = x.double() @ w.double().T + bias.double()
    torch.testing.assert_close(z.double(), exact, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(y.double(), exact.clamp(min=0) ** 2, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["glu", "dgrad", "dgrad_act", "dgrad_pairs", "dglu", "wgrad", "wgrad_accumulate_"]
)
def test_other_products_agree_with_float64(name):
    of = RandomOperands(264, 72, 136, torch.bfloat16, form="descriptor", tile=PAIR)
    cases = numerics._product(of, name, "pair")
    for case, schedule in zip(cases, machine.SCHEDULES.values(), strict=False):

        def run(case=case, schedule=schedule):
            return numerics._emulated(case.run, schedule, 100, explores=False)

        assert examine(NumericCase(case.name, run), Frames()).failure == ""


@pytest.mark.parametrize(("stages", "steps", "tiles"), [(2, 1, 1), (2, 3, 1), (2, 1, 2), (3, 2, 1)])
def test_no_order_of_events_is_a_fault(stages, steps, tiles):
    assert launched(stages, steps, tiles).explore() > 6000


def test_launch_says_which_gpus_have_such_tiles():
    with (
        machine.emulating(capability=100),
        pytest.raises(ValueError, match=r"-c1 expected a GPU of compute capability 9\.0, got cuda 100"),
    ):
        linear_fwd(matrix(64, 64), matrix(64, 64), tile=replace(PAIR, block_rows=128, blocks=1))
    with (
        machine.emulating(capability=103),
        pytest.raises(
            ValueError, match=r"-b2 expected a GPU of compute capability 9\.0 or 10\.0, got cuda 103"
        ),
    ):
        linear_fwd(matrix(64, 64), matrix(64, 64), tile=PAIR)


def test_tensor_memory_has_an_end():
    layout = TensorMemoryLayout([128, 256], 1, [[1, 0]], two_ctas=True)
    with (
        recording(Recorder((0, 0, 0), (1, 1, 1), 8, blocks=2)),
        pytest.raises(machine.Misuse, match="768 columns of tensor memory, of 512"),
    ):
        allocate_tensor_memory(torch.float32, [3, 256, 256], layout)


def mutants_on_blackwell(trace: Trace) -> Iterator[tuple[str, Trace]]:
    def named(start: str) -> set[int]:
        return {n for n, name in enumerate(trace.barriers) if name.startswith(start)}

    full, empty, done, unread = (named(f"made{mark} of") for mark in ("", "#2", "#3", "#4"))
    meeting = trace.barriers.index("the blocks of the pair")
    assert (len(full), len(empty), len(done), len(unread)) == (2, 4, 4, 2)

    def at(kind: type, barriers: set[int]) -> Callable:
        return lambda role, event: isinstance(event, kind) and event.barrier in barriers

    def dropping(which: Callable) -> Trace:
        return rewritten(trace, lambda role, event: [] if which(role, event) else [event])

    def changing(which: Callable, change: Callable) -> Trace:
        return rewritten(
            trace, lambda role, event: [replace(event, **change(event)) if which(role, event) else event]
        )

    def moved(which: Callable, before: type) -> Trace:
        """Each of these events comes before the last of a kind that it follows."""

        def of(role):
            made = []
            for event in role.events:
                places = [n for n, one in enumerate(made) if isinstance(one, before)]
                made.insert(places[-1] if places and which(role, event) else len(made), event)
            return replace(role, events=tuple(made))

        return replace(trace, segments=(tuple(map(of, trace.segments[0])),))

    second_copies = lambda role, event: SECOND(role) and isinstance(event, CopyIn)  # noqa: E731
    yield "sums are begun before they were read", dropping(at(Wait, unread))
    yield "sums are given back before they were read", moved(at(Arrive, unread), Load)
    yield "sums are never given back", dropping(at(Arrive, unread))
    yield "one block gives sums back for both", changing(at(Init, unread), lambda event: {"count": 1})
    yield "sums are read before they are complete", dropping(at(Wait, done))
    yield "sums are said to be complete a product early", moved(at(Commit, done), TensorMultiply)
    yield "nobody is told of complete sums", dropping(at(Commit, done))
    yield (
        "one block is told of complete sums",
        dropping(lambda role, event: at(Commit, done)(role, event) and trace.block_of[event.barrier] == 1),
    )
    yield (
        "told at the barrier of a buffer",
        changing(at(Commit, done), lambda event: {"barrier": min(empty)}),
    )
    yield "a buffer is free a product early", moved(at(Commit, empty), TensorMultiply)
    yield (
        "a buffer is filled under its product",
        dropping(lambda role, event: at(Wait, empty)(role, event) and "load" in role.name),
    )
    yield (
        "the second block is not told of free buffers",
        dropping(lambda role, event: at(Commit, empty)(role, event) and trace.block_of[event.barrier] == 1),
    )
    yield "nobody waits for copies", dropping(at(Wait, full))
    yield "a half is not copied", dropping(second_copies)
    yield (
        "a half is neither copied nor expected",
        rewritten(
            changing(
                lambda role, event: SECOND(role) and isinstance(event, Expect), lambda event: {"nbytes": 0}
            ),
            lambda role, event: [] if second_copies(role, event) else [event],
        ),
    )
    yield "a block waits for its own copies only", changing(at(Init, full), lambda event: {"count": 1})
    yield "blocks end alone", dropping(last_meeting(trace, meeting, lambda role: True))
    yield (
        "the first block ends alone",
        dropping(
            lambda role, event: isinstance(event, Wait) and last_meeting(trace, meeting, FIRST)(role, event)
        ),
    )


CAUGHT_AS = {
    "sums are begun before they were read": {"Race"},
    "sums are given back before they were read": {"Race"},
    "sums are never given back": {"Deadlock"},
    "one block gives sums back for both": {"Race", "Misuse"},
    "sums are read before they are complete": {"Race"},
    "sums are said to be complete a product early": {"Race"},
    "nobody is told of complete sums": {"Deadlock"},
    "one block is told of complete sums": {"Deadlock"},
    "told at the barrier of a buffer": {"Deadlock", "Race", "Misuse"},
    "a buffer is free a product early": {"Race"},
    "a buffer is filled under its product": {"Race"},
    "the second block is not told of free buffers": {"Deadlock"},
    "nobody waits for copies": {"Race"},
    "a half is not copied": {"Deadlock"},
    "a half is neither copied nor expected": {"Race"},
    "a block waits for its own copies only": {"Race", "Misuse"},
    "blocks end alone": {"Misuse", "Undrained"},
    "the first block ends alone": {"Misuse", "Undrained"},
}


def test_every_mutant_is_caught():
    (trace,) = launched(stages=2, steps=1, tiles=3).traces()
    found = faults_of(trace, mutants_on_blackwell(trace))
    assert {name: fault for name, fault in found.items() if fault not in CAUGHT_AS[name]} == {}
    assert found.keys() == CAUGHT_AS.keys()


def test_mutants_of_buffers_are_caught_where_depth_uses_them_again():
    """Those of sums need a third tile."""
    (trace,) = launched(stages=2, steps=3, tiles=1).traces()
    found = faults_of(trace, mutants_on_blackwell(trace))
    missed = {name for name, fault in found.items() if fault == "none"}
    assert missed == {
        "sums are begun before they were read",
        "sums are given back before they were read",
        "sums are never given back",
        "one block gives sums back for both",
    }
    assert all(fault in CAUGHT_AS[name] for name, fault in found.items() if name not in missed)


def test_commits_that_land_at_any_time_change_no_verdict(monkeypatch):
    (trace,) = launched(stages=2, steps=1, tiles=1).traces()
    states = machine.search(trace)

    def faults() -> dict[str, str]:
        return faults_of(trace, mutants_on_blackwell(trace))

    before = faults()
    assert sum(fault != "none" for fault in before.values()) == 13  # the others need a second tile
    monkeypatch.setattr(Steps, "landing_matters", Steps.landing)
    monkeypatch.setattr(Steps, "private", lambda steps, state: None)
    assert faults() == before
    assert machine.search(trace) > 1.5 * states


SLIPS = {  # module, what stands there, what does not belong there, what it leads to
    "sums of the tile before are added to": (
        "tensor_memory",
        "tcgen05_mma(a, b, acc, use_acc=step > 0,",
        "tcgen05_mma(a, b, acc, use_acc=True,",
        machine.Race,
    ),
    "load ends when tensor cores still arrive": (
        "roles",
        "            mbarrier.wait(operands[3].index(buffer), phase ^ 1)\n",
        "            pass\n",
        machine.Undrained,
    ),
    "products that no commit tells of": (
        "tensor_memory",
        "            tcgen05_commit(empty.index(buffer))\n",
        "            pass\n",
        machine.Deadlock,
    ),
    "a block ends alone": ("matmul", "        gl.barrier(cluster=True)\n", "        pass\n", machine.Misuse),
}


@pytest.mark.parametrize(("module", "old", "new", "fault"), SLIPS.values(), ids=SLIPS)
def test_edit_of_the_source_is_caught(module, old, new, fault):
    with edited(import_module(f"tpkernels.kernels.gluon.{module}"), old, new):
        one = launched(stages=2, steps=1, tiles=1)
        with pytest.raises(fault):
            one.explore()
