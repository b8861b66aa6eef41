"""A change of cycles is told with its reason, and nothing else is."""

import json
import re
from dataclasses import replace

import pytest

from tests.gate.samples import COST, FACTS
from tpkernels.gate import expectations, report
from tpkernels.gate.ahead_of_time import CompileJob
from tpkernels.gate.clock.cost import Cost, Stretch
from tpkernels.gate.clocking import Examined
from tpkernels.gate.compile_gate import Checked, Compiled, judge
from tpkernels.gate.computing import Computed
from tpkernels.gate.expectations import Budget, as_text, from_text, kept
from tpkernels.registered.entries import entry_specs

JOB = CompileJob(replace(next(iter(entry_specs().values())).entry(), rules=()), "sm_90")
ROW = replace(COST, step=None, ideal=0.0)  # a kernel without products


def changed(name: str, cycles: float, serial_loads: int = 0, **waits: float) -> Cost:
    """COST with another stretch: its causes of before, with these cycles in place of theirs."""
    before = getattr(COST, name)
    return replace(COST, **{name: Stretch(cycles, {**before.waits, **waits}, serial_loads)})


@pytest.fixture
def failures():
    """What is said of a cost where COST, or another one, is the budget."""

    def told(cost, facts=FACTS, before=COST, triton="3.7.1"):
        rows = {("sm_90", JOB.entry.name): Budget.of(FACTS, before)}
        table = expectations.updated(None, rows, rows, {"triton": "3.7.1"})
        return judge(JOB, Examined(facts, cost), table, triton).failures

    return told


HAIR = 1.031 * 5950  # past what is tolerated
IN_TURN = changed("edge", 14100.0, serial_loads=4, copies=7000.0)
SLOWER = {
    "a_step": (changed("step", 1460.0, copies=730.0), "step 1,040 -> 1,460 cycles: waits for copies"),
    "in_turn": (IN_TURN, "edge 5,950 -> 14,100 cycles: 4 loads awaited one after the other"),
    "a_new_cause": (changed("edge", 8000.0, barrier=2000.0), "edge 5,950 -> 8,000 cycles: waits for barrier"),
    "no_cause": (changed("edge", 9000.0), "edge 5,950 -> 9,000 cycles: more instructions"),
    "a_hair": (changed("edge", HAIR, stores=2600.0), "edge 5,950 -> 6,134 cycles: waits for stores"),
}


@pytest.mark.parametrize(("cost", "said"), SLOWER.values(), ids=SLOWER.keys())
def test_a_slower_stretch_fails_and_says_what_it_waits_for(failures, cost, said):
    assert failures(cost) == (said,)


def test_both_stretches_are_told(failures):
    worse = replace(COST, step=replace(COST.step, cycles=2000.0), edge=replace(COST.edge, cycles=7000.0))
    assert failures(worse) == (
        "step 1,040 -> 2,000 cycles: more instructions",
        "edge 5,950 -> 7,000 cycles: more instructions",
    )


def test_within_three_percent_and_a_few_cycles_nothing_is_said(failures):
    for factor in (0.971, 1.0, 1.029):
        assert failures(changed("step", factor * 1040)) == ()
        assert failures(changed("edge", factor * 5950)) == ()
    hidden = replace(COST, edge=Stretch(-0.4, {}, 0))
    assert as_text(hidden.edge) == "0 cycles"
    for edge in (-0.4, 0.0, 12.0):
        assert failures(replace(hidden, edge=Stretch(edge, {}, 0)), before=hidden) == ()
    assert failures(replace(hidden, edge=Stretch(40.0, {"stores": 30.0}, 0)), before=hidden) == (
        "edge 0 -> 40 cycles: waits for stores",
    )


def test_faster_and_other_instructions_are_told(failures):
    assert failures(changed("step", 900.0)) == ("faster: step 1,040 -> 900 cycles",)
    other = replace(FACTS, instructions={"HGMMA": 8})
    assert failures(changed("step", 900.0), other) == (
        "faster: step 1,040 -> 900 cycles",
        "other instructions: HGMMA 8, was 4",
    )


def test_a_slower_stretch_is_told_before_a_faster_one(failures):
    other = replace(FACTS, instructions={"HGMMA": 8})
    cost = replace(changed("edge", 9000.0), step=replace(COST.step, cycles=900.0))
    assert failures(cost, other) == ("edge 5,950 -> 9,000 cycles: more instructions",)


def test_only_what_both_rows_have_of_one_triton_is_compared(failures):
    assert failures(ROW, before=ROW) == ()
    slower = replace(ROW, edge=Stretch(9000.0, {"scoreboard: LDG": 4000.0}, 0))
    assert failures(slower, before=ROW) == ("edge 5,950 -> 9,000 cycles: waits for LDG",)
    slower = changed("edge", 9000.0)
    assert failures(slower, triton="3.7.2") == ()
    assert failures(slower, before=None) == ()


def test_what_cannot_be_clocked_is_a_failure_even_without_budgets(failures):
    said = "UnknownInstruction: FROB at 0x40 of _linear_fwd_kernel"
    assert failures(said) == (f"cannot be clocked: {said}",)
    assert judge(JOB, Examined(FACTS, said), None, "3.9.0").failures[-1] == f"cannot be clocked: {said}"


def test_stretches_are_read_as_they_were_written():
    assert as_text(COST.step) == "1040 cycles; copies 310; products 90"  # a cause of 3 cycles is not kept
    serial = Stretch(5950.0, {"scoreboard: LDG": 700.0}, 4)
    assert as_text(serial) == "5950 cycles, 4 serial loads; scoreboard: LDG 700"
    assert from_text(as_text(serial)) == serial
    assert kept(COST).step == Stretch(1040.0, {"copies": 310.0, "products": 90.0}, 0)
    assert kept(kept(COST)) == kept(COST) != COST
    assert kept(ROW) == ROW
    assert kept(replace(ROW, program="2b20c4da")).program == "2b20c4da"
    row = Budget.of(FACTS, COST).as_json()
    assert Budget.from_json(row) == Budget.of(FACTS, COST)


def test_report_has_cycles_and_the_worst_case_of_each_launcher(capsys, tmp_path):
    rows = [Compiled(JOB, FACTS, cost=cost) for cost in (COST, ROW, None)]
    errors = {"a": 0.25, "b": 0.5, "c": 0.125}
    cases = [Computed(f"linear_fwd/{name}", error, "") for name, error in errors.items()]
    report.tell({}, Checked(rows, [], []), cases, 1.0, tmp_path / "report.json")
    said = capsys.readouterr().out
    headings, *lines = (line.split() for line in said.splitlines() if "  " in line)
    columns = headings.index("step"), headings.index("edge")
    assert [[line[column + 1] for column in columns] for line in lines[:3]] == [
        ["1,040", "5,950"],
        ["-", "5,950"],
        ["-", "-"],
    ]
    assert re.search(r"^ok +linear_fwd +3 cases +0\.50$", said, re.MULTILINE)
    written = json.loads((tmp_path / "report.json").read_text())["compiled"]
    assert [one["cost"] and Cost.from_json(one["cost"]) for one in written] == [COST, ROW, None]


WRONG = Computed("linear_fwd/bf16", 3.0, "y is off by 3 times the bound")


@pytest.mark.parametrize(
    ("faults", "changes", "absent", "wrong", "is_named"),
    [
        ((), ("faster: step 1,040 -> 900 cycles",), [], [], True),
        ((), ("registers 191 > 168",), [], [WRONG], False),
        (("STL: 3",), ("registers 191 > 168",), [], [], False),
        ((), ("registers 191 > 168",), ["no budgets for Triton 3.9"], [], False),
        ((), (), [], [], False),
    ],
    ids=["change", "numerics", "rule", "absent", "well"],
)
def test_an_update_is_named_where_all_is_change(faults, changes, absent, wrong, is_named, capsys):
    checked = Checked([Compiled(JOB, FACTS, faults, changes)], [], absent)
    failures = report.tell({}, checked, wrong, 1.0, None)
    assert failures == len(faults) + len(changes) + len(absent) + len(wrong)
    assert (report.IF_MEANT in capsys.readouterr().out) == is_named
