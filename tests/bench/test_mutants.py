"""Faults that are drawn, planted and seen, in a package of a few lines."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from bench.mutants import __main__ as mutants
from bench.mutants.__main__ import Tree, Trials, nearest_tests, table
from bench.mutants.draw import Mutant, Sites, drawn
from tests.patience import patient

ROOT = Path(__file__).parents[2]
SOURCE = """\
import os
import time

def size(rows, cols):
    if rows > 100:
        os.abort()
    return rows * cols

def loops(on):
    while on:
        time.sleep(1)

def unused():
    return 1 + 2
"""
TESTS = """\
from tpkernels.room.it import loops, size

def test_broken():
    assert size(2, 3) == 7

def test_size():
    assert size(2, 3) == 6

def test_loops():
    loops(False)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("checkout")
    files = {
        "tpkernels/room/it.py": SOURCE,
        "tests/room/test_it.py": TESTS,
        "out/.gitignore": "",
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    return Tree(checkout, tmp_path_factory.mktemp("folder"))


def line_with(before, after):
    lines = SOURCE.splitlines()
    number = next(i for i, line in enumerate(lines) if before in line)
    return Mutant(
        "tpkernels/room/it.py", number + 1, lines[number], lines[number].replace(before, after), "planted"
    )


@pytest.mark.parametrize(
    ("before", "after", "ended", "by"),
    [
        ("rows * cols", "rows", "failed", "test_size"),
        ("while on", "while not on", "hung", "test_loops"),
        ("if rows > 100", "if rows < 100", "crashed", "test_size"),
        ("rows > 100", "rows >= 100", "passed", ""),
    ],
    ids=["wrong", "hangs", "crashes", "not_noticed"],
)
def test_fault_meets_its_tests(tree, before, after, ended, by, monkeypatch):
    """pytest takes its time before its first words, on a busy machine more than a hang is given."""
    speaking, select = set(), mutants.select.select

    def patiently(pipes, *others):
        has_spoken = pipes[0] in speaking
        speaking.update(pipes)
        return select(pipes, *others) if has_spoken else select(pipes, [], [], patient(60))

    monkeypatch.setattr(mutants.select, "select", patiently)
    trials = Trials(seconds=60, hang=2 if ended == "hung" else 60)
    trials.broken.add("tests/room/test_it.py::test_broken")
    found = trials.judge(tree, line_with(before, after))
    assert (found["result"], found["ended"]) == ("survived" if ended == "passed" else "killed", ended)
    assert found["by"] == (by and f"tests/room/test_it.py::{by}")
    assert (tree.root / "tpkernels/room/it.py").read_text() == SOURCE


def test_test_that_fails_without_the_fault_kills_none(tree):
    trials = Trials()
    found = trials.judge(tree, line_with("rows * cols", "rows"))
    assert found["by"] == "tests/room/test_it.py::test_size"
    assert trials.broken == {"tests/room/test_it.py::test_broken"}


def test_nearest_tests_come_first():
    fault = Mutant("tpkernels/comm/schedule.py", 1, "", "", "")
    found = nearest_tests(ROOT, fault)
    assert "tests/comm/test_schedule.py" in found[: len(found) // 4]
    assert found.index("tests/comm/test_order.py") < found.index("tests/groups/test_plan.py")


def test_shares_are_of_what_can_be_seen():
    found = {"result": "survived", "room": "ops", "by": ""}
    results = {"a": found | {"result": "killed"}, "b": found, "c": found, "d": found | {"result": "absent"}}
    lines = table(results, {"b": "equivalent: no difference"}).splitlines()
    assert lines[2:4] == ["| ops | 1 | 1 | 1 | 50% |", "| all | 1 | 1 | 1 | 50% |"]
    assert lines[-1] == "Not tried: `d`: ."


def test_line_that_another_checkout_lacks_is_not_tried(tree):
    assert Trials().judge(tree, Mutant("tpkernels/room/it.py", 1, "gone", "", ""))["result"] == "absent"


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = (a) not in (b)", {"x = (a) in (b)"}),
        ("x = a * (b + c)", {"x = a", "x = a * (b - c)"}),
        ("x = (a + é) // 2", {"x = (a + é)", "x = (a - é) // 2", "x = (a + é) // 3"}),
        ("x = not (a and b)", {"x = (a and b)", "x = not (a or b)"}),
        ("x += 1", {"x -= 1", "x += 2"}),
        ("work.wait()", {"pass"}),
        ("x = f(a, b, keep=True)", {"x = f(b, a, keep=True)", "x = f(a, b)", "x = f(a, b, keep=False)"}),
        ("x = max(a, b)", {"x = min(a, b)", "x = max(b, a)"}),
        ("def f(a: int = 1) -> Literal[1]: return a", {"def f(a: int = 2) -> Literal[1]: return a"}),
        ("x: Literal[1] = y[0]", {"x: Literal[1] = y[1]"}),
        ('raise ValueError(f"{a + 1}") if a < 1 else b', set()),
        ("assert a == b", set()),
        ("__all__ = [1]", set()),
        ("if TYPE_CHECKING: x = 1", set()),
        ('if device == "cuda": x = 1', {'if device != "cuda": x = 1'}),
        ("def f():\n    import no_such_package\n    return 1", set()),
        ("print(a + b)", set()),
        ("x = a + 'text'", set()),
        ("x = isinstance(a, b)", set()),
    ],
)
def test_faults_of_a_line(line, faults):
    assert {fault.after for fault in Sites("it.py", line).mutants} == faults


def test_draw_depends_on_the_seed_alone_and_compiles(tmp_path):
    (tmp_path / "tpkernels").mkdir()
    for name in ("csrc", "tpkernels/groups", "tpkernels/models"):
        shutil.copytree(ROOT / name, tmp_path / name)
    faults = drawn(tmp_path, 1, 20, 12)
    assert faults == drawn(tmp_path, 1, 20, 12) != drawn(tmp_path, 2, 20, 12)
    rooms = Counter(fault.room for fault in faults)
    assert rooms["csrc"] == 12
    assert rooms["groups"] > rooms["models"] >= 4
    assert rooms["groups"] + rooms["models"] in range(18, 23)
    for fault in faults:
        lines = (ROOT / fault.file).read_text().splitlines()
        assert lines[fault.line - 1] == fault.before != fault.after
        lines[fault.line - 1] = fault.after
        if fault.file.endswith(".py"):
            compile("\n".join(lines), fault.file, "exec")
