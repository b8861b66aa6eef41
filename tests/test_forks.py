"""Forks in tests: one that never comes back from os.fork() is made anew, one that fails is told."""

import os
import signal

import pytest

from tests import forks
from tests.forks import forked


def test_answer_of_a_fork():
    seen = []
    assert forked(os.getppid, lambda: seen.append("parent")) == os.getpid()
    assert seen == ["parent"]


def hang_at_first(times, monkeypatch):
    """Let that many forks hang inside os.fork()."""
    fork, left = os.fork, [None] * times

    def hanging():
        process = fork()
        if left and process == 0:
            signal.pause()
            os._exit(1)
        if left:
            left.pop()
        return process

    monkeypatch.setattr(os, "fork", hanging)
    monkeypatch.setattr(forks, "BEGIN_SECONDS", 0.5)


def test_fork_that_never_began_is_made_anew(monkeypatch):
    monkeypatch.setattr(forks, "ATTEMPTS", 3)
    hang_at_first(2, monkeypatch)
    assert forked(lambda: "here") == "here"


def test_forks_that_never_begin_are_an_error(monkeypatch):
    monkeypatch.setattr(forks, "ATTEMPTS", 2)
    hang_at_first(2, monkeypatch)
    with pytest.raises(AssertionError, match="no fork of 2 began"):
        forked(lambda: "here")


def test_fork_that_died_is_an_error():
    with pytest.raises(EOFError):
        forked(lambda: os.kill(os.getpid(), signal.SIGKILL))
