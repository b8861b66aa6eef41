"""The table of budgets: what counts as over, and how it is kept."""

import json
import re
from dataclasses import replace

import pytest
import triton

from tests.gate.samples import FACTS
from tpkernels.gate import compile_gate, expectations, report
from tpkernels.gate.ahead_of_time import ARCHITECTURES
from tpkernels.gate.causes import Change
from tpkernels.gate.compile_gate import Checked, Compiled, CompileJob, Suite, judge
from tpkernels.gate.computing import Computed
from tpkernels.gate.expectations import as_row, from_row, kept
from tpkernels.kernels import triton_versions
from tpkernels.registered.entries import catalog, entry_specs
from tpkernels.registered.names import TABLE

JOB = CompileJob(replace(catalog()[0], rules=()), "sm_90")
BUDGETED = replace(
    FACTS,
    **{"registers": 64, "threads": 128, "blocks": 8, "pipeline": (4, 3), "loops": 1, "load_waits": 2},
    loop={"all": 100, "shared loads": 4, "work": 64},
)
SAME = "still 8 blocks an SM"


@pytest.mark.parametrize("facts", [FACTS, BUDGETED, replace(FACTS, spills=2, instructions={})])
def test_rows_are_read_as_they_were_written(facts):
    assert from_row(as_row(facts)) == kept(facts) == kept(kept(facts))
    assert facts.instructions == kept(facts).instructions
    assert kept(facts).aligned == frozenset()


def test_a_row_is_short():
    assert as_row(FACTS) == {
        **{"registers": 163, "shared": 1000, "in_flight": 1},
        **{"instructions": "HGMMA 4", "loop": "", "rest": ""},
    }
    row = as_row(BUDGETED)
    assert (row["pipeline"], row["loop"]) == ("4 3", "all 100, shared loads 4, work 64")


HELD = [*expectations.NUMBERS, *expectations.COUNTS, "pipeline"]


@pytest.mark.parametrize("name", HELD)
def test_a_difference_of_any_number_is_a_change(name):
    was = getattr(BUDGETED, name)
    more = (
        (*was, 9)
        if name == "pipeline"
        else {**was, "STS": 9}
        if name in expectations.COUNTS
        else (was or 0) + 9
    )
    assert expectations.failures(kept(BUDGETED), replace(BUDGETED, **{name: more}), "gfx942", True)


SAID = {  # what is compiled -> failures with the Triton of the budget, and with another patch of it
    "same": (BUDGETED, (), ()),
    "registers": (
        replace(BUDGETED, registers=72, blocks=7),
        ("64 to 72 registers: occupancy 50 to 44 %",),
        ...,
    ),
    "registers_alone": (replace(BUDGETED, registers=72), (f"64 to 72 registers, {SAME}",), ...),
    "shared": (replace(BUDGETED, shared=1001), (f"1,000 to 1,001 bytes of shared memory, {SAME}",), ...),
    "pipeline": (replace(BUDGETED, pipeline=(2, 2)), ("a pipeline of 4 and 3 is one of 2",), ...),
    "spills": (replace(BUDGETED, spills=2), ("registers spill: 0 to 2 accesses",), ...),
    "better": (
        replace(BUDGETED, in_flight=2),
        ("better: batches in flight 1 to 2",),
        (),
    ),
    "instructions": (
        replace(BUDGETED, instructions={"HGMMA": 8}),
        ("other instructions: HGMMA 8, was 4",),
        (),
    ),
    "worse_beside_others": (
        replace(BUDGETED, instructions={"HGMMA": 8}, in_flight=0, load_waits=1),
        ("products are awaited one by one: batches in flight 1 to 0",),
        ...,
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_budget_excuses_no_change(name):
    facts, same, other = SAID[name]
    rows = {("sm_90", JOB.entry.name): kept(BUDGETED)}
    table = expectations.updated(None, rows, rows, {"triton": "3.7.1"})
    assert judge(JOB, facts, table, "3.7.1").failures == same
    assert judge(JOB, facts, table, "3.7.2").failures == (same if other is ... else other)


@pytest.mark.parametrize("lost", [("sm_80", "another"), ("sm_90", "another")], ids=["row", "architecture"])
def test_what_a_table_has_lost_fails(monkeypatch, lost):
    monkeypatch.setattr(compile_gate, "violations", lambda *_: [])
    measured = {lost: kept(FACTS)}
    table = expectations.updated(None, measured, measured, {})
    judged = judge(CompileJob(catalog()[0], "sm_80"), FACTS, table, "3.7.1")
    assert judged.failures == ("no budget yet",)


def test_table_of_budgets_survives_and_drops_what_is_gone(tmp_path):
    path = tmp_path / "budgets.json"
    measured = {("sm_90", name): kept(FACTS) for name in ("one", "two")}
    table = {"3.7": expectations.updated(None, measured, set(measured), {"triton": "3.7.1"})}
    expectations.write(table, path)
    assert expectations.read(path) == table
    assert sum("registers" in line for line in path.read_text().splitlines()) == 2  # a line an entry
    later = expectations.updated(table["3.7"], {}, {("sm_90", "two")}, {})
    assert list(later.rows["sm_90"]) == ["two"]


def test_a_table_of_one_architecture_may_not_lose_it(monkeypatch, tmp_path):
    """Others have none until an update has their rows: a failure, unless that is allowed."""
    monkeypatch.setattr(compile_gate, "compile_all", lambda tasks, *_: [FACTS for _ in tasks])
    path, entry = tmp_path / "budgets.json", catalog()[0]
    entry = replace(entry, architectures=("sm_80", "sm_90"), rules=())
    hopper, ampere = (CompileJob(entry, architecture) for architecture in ("sm_90", "sm_80"))
    suite = Suite("mine", {entry.name: entry}, path)
    minor = expectations.minor_version(triton.__version__)

    def check(*jobs, update=False, allow=True):
        compiled, notes, absent = compile_gate.check(suite, jobs, 1, print, update, allow)
        return [one.failures for one in compiled], notes, absent

    check(hopper, update=True)
    assert expectations.read(path)[minor].provenance["architectures"] == "sm_90"
    failures, notes, absent = check(hopper, ampere, allow=False)
    assert (failures, notes) == ([(), ()], [])
    assert absent[0].startswith(f"no budgets for Triton {minor} on sm_80 (some for Triton {minor}), ")
    check(hopper, update=True)  # another update of the same leaves the list
    assert check(hopper, ampere) == ([(), ()], absent, [])

    written = path.read_text()
    whole = expectations.read(path)[minor]
    expectations.write({minor: expectations.Budgets(whole.provenance, {})}, path)
    assert check(hopper, ampere) == ([("no budget yet",), ()], absent, [])

    path.write_text(written)
    check(ampere, update=True)
    assert "architectures" not in expectations.read(path)[minor].provenance
    assert check(hopper, ampere, allow=False) == ([(), ()], [], [])

    path.unlink()
    _, _, (nothing,) = check(hopper, allow=False)
    assert nothing.startswith(f"no budgets for Triton {minor} on sm_90 (some for Triton none), ")


def test_another_patch_of_triton_is_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_gate, "compile_all", lambda tasks, *_: [FACTS for _ in tasks])
    path, entry = tmp_path / "budgets.json", replace(catalog()[0], architectures=("sm_90",), rules=())
    suite = Suite("mine", {entry.name: entry}, path)
    jobs, minor = [CompileJob(entry, "sm_90")], expectations.minor_version(triton.__version__)
    compile_gate.check(suite, jobs, 1, print, True)
    written = expectations.read(path)
    written[minor].provenance["triton"] = f"{minor}.99"
    expectations.write(written, path)
    _, notes, absent = compile_gate.check(suite, jobs, 1, print, False)
    assert absent == []
    told = "only worse code fails"
    assert notes == [f"budgets are of Triton {minor}.99, and this is {triton.__version__}: {told}"]


ALL, HOPPER = ARCHITECTURES, ("sm_90",)
WRITTEN = {"3.6": ALL, "3.7": ALL, "3.8": HOPPER, "3.9": HOPPER}  # Triton -> GPUs with budgets


def test_each_triton_has_budgets_of_all_entries_and_no_others(monkeypatch):
    table = expectations.read(TABLE)
    assert table.keys() == WRITTEN.keys()
    for minor, gpus in WRITTEN.items():
        assert {gpu for gpu in ARCHITECTURES if table[minor].hold(gpu)} == {*gpus}
        version = tuple(map(int, minor.split(".")))  # of another Triton, where some tiles are others
        monkeypatch.setattr(triton_versions, "triton_version", lambda version=version: version)
        entries = [spec.entry() for spec in entry_specs().values()]
        expected = {(gpu, e.name) for e in entries for gpu in gpus if gpu in e.architectures}
        assert table[minor].keys() == expected, f"run `check --update` on Triton {minor}"


def test_rows_of_products_have_their_loops():
    for minor, rows in expectations.read(TABLE).items():
        for name, facts in rows.rows["sm_90"].items():
            is_product = re.search(r"/\d+x\d+x\d+-w", name) is not None  # the name of such a tile
            assert not is_product or facts.loops, f"{name}: run `check --update` on Triton {minor}"


DAMAGE = {
    "not_json": "<<<<<<< HEAD",
    "deeply_nested": "[" * 100_000,
    "a_list": "[]",
    "other_counts": """{"3.7": {"provenance": {}, "rows": {"sm_90":
        {"a": {"instructions": "HGMMA", "registers": 8, "shared": 0}}}}}""",
    "other_columns": """{"3.7": {"provenance": {}, "rows": {"sm_90":
        {"a": {"registers": 8, "shared": 0, "edge": "5950 cycles"}}}}}""",
    "other_numbers": '{"3.7": {"provenance": {}, "rows": {"sm_90": {"a": 1}}}}',
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_table_is_refused_by_name(text, tmp_path):
    (tmp_path / "budgets.json").write_text(text)
    with pytest.raises(ValueError, match=r"budgets\.json is no table of budgets"):
        expectations.read(tmp_path / "budgets.json")


def test_report_has_loops_and_the_worst_case_of_each_launcher(capsys, tmp_path):
    rows = [Compiled(JOB, facts) for facts in (BUDGETED, FACTS)]
    errors = {"a": 0.25, "b": 0.5, "c": 0.125}
    cases = [Computed(f"linear_fwd/{name}", error, "") for name, error in errors.items()]
    report.tell({}, Checked(rows, [], []), cases, 1.0, tmp_path / "report.json")
    said = capsys.readouterr().out
    headings, *lines = (line.split() for line in said.splitlines() if "  " in line)
    columns = headings.index("ahead"), headings.index("loop")
    assert [[line[column + 1] for column in columns] for line in lines[:2]] == [["4", "100"], ["-", "-"]]
    assert re.search(r"^ok +linear_fwd +3 cases +0\.50$", said, re.MULTILINE)
    written = json.loads((tmp_path / "report.json").read_text())["compiled"]
    assert [one["facts"]["load_waits"] for one in written] == [2, 0]


WRONG = Computed("linear_fwd/bf16", 3.0, "y is off by 3 times the bound")


@pytest.mark.parametrize(
    ("faults", "changes", "absent", "wrong", "is_named"),
    [
        ((), ("a pipeline of 2 is one of 4",), [], [], True),
        ((), ("64 to 72 registers",), [], [WRONG], False),
        (("STL: 3",), ("64 to 72 registers",), [], [], False),
        ((), ("64 to 72 registers",), ["no budgets for Triton 3.9"], [], False),
        ((), (), [], [], False),
    ],
    ids=["change", "numerics", "rule", "absent", "well"],
)
def test_an_update_is_named_where_all_is_change(faults, changes, absent, wrong, is_named, capsys):
    changed = tuple(Change("a", text, "worse") for text in changes)
    checked = Checked([Compiled(JOB, FACTS, faults, changed)], [], absent)
    failures = report.tell({}, checked, wrong, 1.0, None)
    assert failures == len(faults) + len(changes) + len(absent) + len(wrong)
    assert (report.IF_MEANT in capsys.readouterr().out) == is_named
