"""Child processes hold up nobody, lose no work but what kills them, and end with who started them."""

import os
import sys

import pytest

from tests import programs
from tests.programs import await_end_of, is_running, until
from tpkernels.gate import child as module
from tpkernels.gate.child import ending, started
from tpkernels.gate.workers import results_of


def python(program):
    return started((sys.executable, "-S", "-c", program))


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "with exit code 0"), (3, "with exit code 3"), (-9, "by SIGKILL"), (-40, "by signal 40")],
)
def test_ending_is_told_by_name_where_the_signal_has_one(code, words):
    assert ending(code) == words


def test_lines_of_any_length_are_told_until_the_end():
    with python("print('a' * 3_000_000); print('b'); print('c', end='')") as child:
        assert [line[:1] for line in child.lines_until_end()] == ["a", "b"]
        assert child.end() == 0


def test_last_words_are_those_of_the_error():
    with python("raise ValueError('one\\ntwo\\n')") as child:
        assert list(child.lines_until_end()) == []
        assert (child.end(), child.last_words(), child.last_words(2)) == (1, "two", "ValueError: one; two")


def test_lines_count_until_the_time_is_over():
    with (
        python("while True: print('x', flush=True)") as child,
        pytest.raises(TimeoutError, match=r"took more than 0\.5 s"),
    ):
        assert set(child.lines_until_end(0.5)) == {"never"}


GRANDCHILD = """
import subprocess, sys
held = subprocess.Popen([sys.executable, "-S", "-c", "while True: print('x' * 9999)"])
print(held.pid, flush=True)
"""


def test_a_grandchild_neither_holds_the_parent_up_nor_outlives_it():
    with python(GRANDCHILD) as child:
        number = int(next(iter(child.lines_until_end())))
        assert is_running(number)
        list(child.lines_until_end())
    await_end_of([number])


def test_a_child_that_somebody_else_has_reaped_is_not_killed(monkeypatch):
    """Its number may be another process's by then."""
    killed = []
    monkeypatch.setattr(module.os, "killpg", lambda *given: killed.append(given))
    with python("print(7)") as child:
        os.waitpid(child._process.pid, 0)
        assert list(child.lines_until_end()) == ["7"]
        assert child.end() == 0
    assert killed == []


def doubled(number: int) -> int | None:
    if number == 3:
        os._exit(1)
    return 2 * number


def test_only_the_item_that_kills_its_process_is_lost():
    told = []
    assert results_of(doubled, [1, 2, 3, 4], 2, told.append, None) == [2, 4, None, 8]
    assert sorted(told) == [1, 2, 3, 4]
    assert results_of(doubled, [], 2, told.append, None) == []


RUNS = """
from pathlib import Path
from tpkernels.gate.user_kernels.children import answers
print(*answers("tpkernels.gate.user_kernels.children", Path("."), [{"module": "hangs"}]))
"""
HANGS = "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(600)"


def test_code_of_others_ends_with_its_parent_even_if_killed(tmp_path):
    """A session of its own has no terminal that would end it."""
    (tmp_path / "hangs.py").write_text(HANGS)
    said = tmp_path / "pid"
    with programs.started("-c", RUNS, cwd=tmp_path) as parent:
        until(lambda: said.exists() and said.read_text().endswith(" "))
        parent.kill()
        await_end_of([int(said.read_text())])
