"""The table of budgets: what counts as over, and how it is kept."""

import re
from dataclasses import replace

import pytest
import triton

from tests.gate.samples import COST, FACTS
from tpkernels.gate import compile_gate, expectations
from tpkernels.gate.ahead_of_time import ARCHITECTURES
from tpkernels.gate.clocking import Examined
from tpkernels.gate.compile_gate import CompileJob, Suite, judge
from tpkernels.gate.expectations import Budget
from tpkernels.kernels import triton_versions
from tpkernels.registered.entries import catalog, entry_specs
from tpkernels.registered.names import TABLE


def test_budget_is_exact_but_for_the_unit_of_registers():
    budget = Budget.of(FACTS)
    assert budget == Budget(registers=168, shared=1000, instructions={"HGMMA": 4})
    assert [*budget.excesses(replace(FACTS, registers=168))] == []
    assert [*budget.excesses(replace(FACTS, registers=191, shared=1001, spills=2))] == [
        "registers 191 > 168",
        "shared 1,001 > 1,000",
        "spills 2 > 0",
    ]
    budget = Budget.of(FACTS)
    assert [*budget.changes(FACTS)] == []
    assert [*budget.changes(replace(FACTS, instructions={"HGMMA": 2, "HMMA": 1_000}))] == [
        "HGMMA 2, was 4",
        "HMMA 1,000, was 0",
    ]


def test_rows_are_read_as_they_were_written():
    for facts in (FACTS, replace(FACTS, spills=2)):
        row = Budget.of(facts).as_json()
        assert Budget.of(facts) == Budget.from_json(row)
    assert Budget.of(FACTS).as_json() == {"registers": 168, "shared": 1000, "instructions": "HGMMA 4"}


def test_instructions_are_of_one_version_and_told_after_worse_excesses(monkeypatch):
    monkeypatch.setattr(compile_gate, "violations", lambda *_: [])
    job = CompileJob(catalog()[0], "sm_80")
    measured = {("sm_80", job.entry.name): Budget.of(FACTS)}
    table = expectations.updated(None, measured, measured, {"triton": "3.7.1"})
    other = replace(FACTS, instructions={"HGMMA": 8})
    assert judge(job, Examined(FACTS), table, "3.7.1").failures == ()
    assert judge(job, Examined(other), table, "3.7.1").failures == ("other instructions: HGMMA 8, was 4",)
    assert judge(job, Examined(other), table, "3.7.2").failures == ()
    larger = Examined(replace(other, shared=2000))
    assert judge(job, larger, table, "3.7.1").failures == ("shared 2,000 > 1,000",)


@pytest.mark.parametrize("lost", [("sm_80", "another"), ("sm_90", "another")], ids=["row", "architecture"])
def test_what_a_table_has_lost_fails(monkeypatch, lost):
    monkeypatch.setattr(compile_gate, "violations", lambda *_: [])
    measured = {lost: Budget.of(FACTS)}
    table = expectations.updated(None, measured, measured, {})
    judged = judge(CompileJob(catalog()[0], "sm_80"), Examined(FACTS), table, "3.7.1")
    assert judged.failures == ("no budget yet",)


def test_table_of_budgets_survives_and_drops_what_is_gone(tmp_path):
    path = tmp_path / "budgets.json"
    measured = {("sm_90", name): Budget.of(FACTS, COST) for name in ("one", "two")}
    table = {"3.7": expectations.updated(None, measured, set(measured), {"triton": "3.7.1"})}
    expectations.write(table, path)
    assert expectations.read(path) == table
    assert sum("registers" in line for line in path.read_text().splitlines()) == 2  # a line an entry
    later = expectations.updated(table["3.7"], {}, {("sm_90", "two")}, {})
    assert list(later.rows["sm_90"]) == ["two"]


def test_a_table_of_one_architecture_may_not_lose_it(monkeypatch, tmp_path):
    """Others have none until an update has their rows: a failure, unless that is allowed."""
    monkeypatch.setattr(compile_gate, "examine_all", lambda tasks, *_: [Examined(FACTS) for _ in tasks])
    path, entry = tmp_path / "budgets.json", catalog()[0]
    entry = replace(entry, architectures=("sm_80", "sm_90"), rules=())
    hopper, ampere = (CompileJob(entry, architecture) for architecture in ("sm_90", "sm_80"))
    suite = Suite("mine", {entry.name: entry}, path, lambda _: None)
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
    monkeypatch.setattr(compile_gate, "examine_all", lambda tasks, *_: [Examined(FACTS) for _ in tasks])
    path, entry = tmp_path / "budgets.json", replace(catalog()[0], architectures=("sm_90",), rules=())
    suite = Suite("mine", {entry.name: entry}, path, lambda _: None)
    jobs, minor = [CompileJob(entry, "sm_90")], expectations.minor_version(triton.__version__)
    compile_gate.check(suite, jobs, 1, print, True)
    written = expectations.read(path)
    written[minor].provenance["triton"] = f"{minor}.99"
    expectations.write(written, path)
    _, notes, absent = compile_gate.check(suite, jobs, 1, print, False)
    assert absent == []
    told = "cycles and instructions are not compared"
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


def test_entries_for_hopper_have_cycles_of_edges_and_steps():
    for minor, rows in expectations.read(TABLE).items():
        for name, budget in rows.rows["sm_90"].items():
            assert "edge" in budget.cycles, f"{name}: run `check --update --arch sm_90` on Triton {minor}"
            is_product = re.search(r"/\d+x\d+x\d+-w", name) is not None  # the name of such a tile
            assert ("step" in budget.cycles) == is_product, name


DAMAGE = {
    "not_json": "<<<<<<< HEAD",
    "deeply_nested": "[" * 100_000,
    "a_list": "[]",
    "other_cycles": """{"3.7": {"provenance": {}, "rows": {"sm_90":
        {"a": {"instructions": "", "registers": 8, "shared": 0, "edge": "5950 cycles; stores"}}}}}""",
    "other_numbers": '{"3.7": {"provenance": {}, "rows": {"sm_90": {"a": 1}}}}',
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_table_is_refused_by_name(text, tmp_path):
    (tmp_path / "budgets.json").write_text(text)
    with pytest.raises(ValueError, match=r"budgets\.json is no table of budgets"):
        expectations.read(tmp_path / "budgets.json")
