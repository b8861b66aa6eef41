"""Compiling and clocking are kept apart: neither is done again for an edit of the other."""

from dataclasses import replace

import pytest

from tests.gate.samples import COST, FACTS
from tpkernels.gate import ahead_of_time, clocking, expectations
from tpkernels.gate.ahead_of_time import DIED, CompileJob, facts_of, machine_code_of
from tpkernels.gate.clock.cost import Cost
from tpkernels.gate.clocking import ClockedJob, Examined, examine, examine_all
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.names import TABLE
from tpkernels.registered.workload import FromCatalog

ENTRY = next(spec.entry() for name, spec in entry_specs().items() if name.startswith("linear/descriptor"))
TASK = ClockedJob(CompileJob(ENTRY, "sm_90"), FromCatalog(ENTRY))


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """How often a compiler and a clock that take no time were asked; `edit` changes what they depend on."""
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path / "cache"))
    counts = {"compiled": 0, "clocked": 0}
    sources = {"kernel": "kernel", "clock": "clock", "launch": "launch"}

    class Made(ahead_of_time._Made):
        code = property(lambda made: sources["kernel"].encode())

        def facts(self):
            return replace(FACTS, cubin=sources["kernel"])

    def made(job):
        counts["compiled"] += 1
        return Made(job, None, 1.0)

    def cost_of(cubin, workload):
        assert cubin == sources["kernel"].encode()
        counts["clocked"] += 1
        return COST

    monkeypatch.setattr(ahead_of_time, "_made", made)
    monkeypatch.setattr(ahead_of_time, "disassemble_ahead", lambda cubins: None)
    monkeypatch.setattr(ahead_of_time, "compile_key", lambda *_: sources["kernel"])
    monkeypatch.setattr(clocking, "built", lambda *_: machine_code_of(ENTRY, "sm_90"))
    monkeypatch.setattr(FromCatalog, "text", lambda _: sources["launch"])
    monkeypatch.setattr(clocking, "cost_of", cost_of)
    monkeypatch.setattr(clocking, "_clock", lambda: sources["clock"])
    return counts, sources


def cost_of_task():
    """Without the hash of the program."""
    cost = examine(TASK).cost
    return replace(cost, program="") if isinstance(cost, Cost) else cost


def test_nothing_is_done_twice_and_an_edit_of_one_asks_the_other_for_nothing(counted, monkeypatch, tmp_path):
    counts, sources = counted
    for _ in range(2):
        assert examine(TASK).facts == replace(FACTS, cubin="kernel")
        assert cost_of_task() == COST
    assert counts == {"compiled": 1, "clocked": 1}

    def after(**edits):
        sources.update(edits)
        examine(TASK)
        return counts["compiled"], counts["clocked"]

    assert after(clock="other clock") == (1, 2)
    assert after(kernel="other kernel") == (2, 3)
    monkeypatch.setattr(ahead_of_time, "compile_key", lambda *_: "a comment")
    assert after() == (3, 3), "the same machine code is not clocked again"
    assert after(launch="other arguments") == (3, 4)
    assert machine_code_of(ENTRY, "sm_90") == b"other kernel"
    assert counts["compiled"] == 3
    for path in (tmp_path / "cache" / "cubins").iterdir():
        path.write_text("{}")  # machine code that was lost is compiled again
    assert machine_code_of(ENTRY, "sm_90") == b"other kernel"
    assert counts["compiled"] == 4


def test_no_process_starts_where_all_is_known_and_else_tasks_of_one_gpu_go_together(counted, monkeypatch):
    _, sources = counted
    examine(TASK)
    started, told = [], []

    def here(work, items, processes, report, of_the_dead):
        started.extend(items)
        for item in items:
            report(item)
        return [work(item) for item in items]

    monkeypatch.setattr(clocking, "results_of", here)
    assert examine_all([TASK], 2, told.append) == [examine(TASK)]
    assert (started, told) == ([], [TASK])
    sources["clock"] = "other clock"
    assert examine_all([TASK], 2, told.append) == [examine(TASK)]
    assert started == [[TASK]]
    started.clear()
    told.clear()
    monkeypatch.setattr(ahead_of_time, "compile_key", lambda entry, architecture: architecture)
    others = [ClockedJob(CompileJob(ENTRY, gpu), None) for gpu in ("sm_80", "sm_100") for _ in range(20)]
    found = examine_all([*others, TASK], 2, told.append)
    assert [len(some) for some in started] == [1, 8, 8, 4, 8, 8, 4]
    assert {len({task.job.architecture for task in some}) for some in started} == {1}
    assert [one.cost for one in found] == [None] * 40 + [examine(TASK).cost]
    assert sorted(map(str, told)) == sorted(map(str, [*others, TASK]))
    started.clear()
    examine_all([ClockedJob(CompileJob(ENTRY, "sm_89"), None)] * 12, 2, told.append)
    assert [len(some) for some in started] == [3] * 4, "two rounds for each process, where there are few"


def test_tasks_beside_one_whose_process_died_are_done_alone(counted, monkeypatch):
    def here(work, items, processes, report, of_the_dead):
        dies = 0 if work is clocking.examine_together else 3
        return [of_the_dead if number == dies else work(item) for number, item in enumerate(items)]

    monkeypatch.setattr(clocking, "results_of", here)
    found = examine_all([ClockedJob(CompileJob(ENTRY, "sm_80"), None)] * 32, 2, lambda task: None)
    assert [number for number, one in enumerate(found) if one == Examined(DIED)] == [3]


def test_what_is_not_clocked_keeps_no_machine_code(counted, tmp_path):
    assert examine(ClockedJob(CompileJob(ENTRY, "sm_100"), None)).cost is None
    assert not (tmp_path / "cache" / "cubins").exists()


def test_errors_are_findings_and_are_not_kept(counted, monkeypatch):
    class UnknownInstruction(Exception):
        pass

    def fails(cubin, workload):
        raise UnknownInstruction("FROB at 0x40")

    sound = clocking.cost_of
    monkeypatch.setattr(clocking, "cost_of", fails)
    assert examine(TASK).cost == "UnknownInstruction: FROB at 0x40"
    monkeypatch.setattr(clocking, "cost_of", sound)
    assert cost_of_task() == COST

    def refuses(job):
        raise RuntimeError("no")

    monkeypatch.setattr(ahead_of_time, "_made", refuses)
    monkeypatch.setattr(ahead_of_time, "compile_key", lambda *_: "new")
    assert examine(TASK) == Examined("RuntimeError: no")


@pytest.mark.parametrize("edited", ["nothing", "kernel", "clock", "launch"])
def test_a_program_whose_cost_its_budget_keeps_is_not_clocked_again(counted, monkeypatch, tmp_path, edited):
    counts, sources = counted
    kept = expectations.kept(examine(TASK).cost)
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path / "another machine"))
    sources[edited] = "another"
    found = examine(replace(TASK, kept=kept)).cost
    assert (found == kept, counts["clocked"]) == ((True, 1) if edited == "nothing" else (False, 2))


BUDGETS = expectations.read(TABLE)["3.7"].rows["sm_90"]


def clocked_anew(name: str) -> Cost:
    """To be run where kernels are compiled."""
    entry = entry_specs()[name].entry()
    compiled = clocking.built(entry, "sm_90", facts_of(entry, "sm_90"))
    return clocking.cost_of(compiled, FromCatalog(entry).workload())


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*BUDGETS][::12])
def test_costs_of_budgets_are_those_of_the_clock(name, compiler):
    found = expectations.kept(compiler.run(clocked_anew, name))
    assert found == replace(BUDGETS[name].cost, program="")
