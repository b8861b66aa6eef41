"""A child process that cannot hold up who started it, and how one that ended is told."""

import os
import sys

import pytest

from tests.programs import await_end_of, is_running
from tpkernels.gate import child as module
from tpkernels.gate.child import ending, started


def python(program):
    return started((sys.executable, "-S", "-c", program))


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "with exit code 0"), (3, "with exit code 3"), (-9, "by SIGKILL"), (-40, "by signal 40")],
)
def test_ending_is_told_by_name_where_the_signal_has_one(code, words):
    assert ending(code) == words


def test_lines_of_any_length_are_told_until_the_end_but_for_one_that_is_cut():
    with python("print('a' * 3_000_000); print('b'); print('c', end='')") as child:
        assert [line[:1] for line in child.lines_until_end()] == ["a", "b"]
        assert child.end() == 0


def test_last_words_are_those_of_the_error():
    with python("raise ValueError('one\\ntwo\\n')") as child:
        assert list(child.lines_until_end()) == []
        assert (child.end(), child.last_words(), child.last_words(2)) == (1, "two", "ValueError: one; two")


def test_lines_count_until_the_time_is_over_whoever_prints_for_ever():
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
