"""What a long command says of how far it is."""

import io

import pytest

from tpkernels.cli import Progress, main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [100.0]
    monkeypatch.setattr("tpkernels.cli.time.monotonic", lambda: now[0])
    return now


def told(stream, monkeypatch, clock, *, seconds=None) -> str:
    """Of three steps, ten seconds after each other."""
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("compiling", 3, seconds=seconds) as step:
        for what in ("one", "two", "three"):
            clock[0] += 10
            step(what)
    return stream.getvalue()


def test_on_a_terminal_one_line_changes_from_the_start_and_is_gone_at_the_end(monkeypatch, clock):
    first, *others = told(Terminal(), monkeypatch, clock).split("\r")[1:]
    assert first.startswith("compiling [0/3] ...")
    assert [line.strip() for line in others] == [
        "compiling [1/3] one",
        "compiling [2/3] two",
        "compiling [3/3] three",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (None, []),
        (5, ["compiling [1/3] one", "compiling [2/3] two", "compiling [3/3] three"]),
        (15, ["compiling [2/3] two"]),
        (60, []),
    ],
)
def test_elsewhere_a_line_is_written_after_so_many_seconds(seconds, lines, monkeypatch, clock):
    assert told(io.StringIO(), monkeypatch, clock, seconds=seconds).splitlines() == lines


def test_check_says_in_a_log_how_far_both_halves_are(monkeypatch, capsys):
    pytest.importorskip("triton")
    from tpkernels.gate import compile_gate, numerics

    def of_kernels(suite, jobs, processes, step, update):
        for job in jobs:
            step(job)
        return [], []

    def in_the_interpreter(only, step):
        step("linear of one tile")
        return []

    monkeypatch.setattr("tpkernels.cli.check.SAID_EVERY", 0.0)
    monkeypatch.setattr(compile_gate, "jobs_of", lambda *_: ["one", "other"])
    monkeypatch.setattr(compile_gate, "check", of_kernels)
    monkeypatch.setattr(numerics, "check", in_the_interpreter)
    with pytest.raises(SystemExit):  # since nothing came of it
        main(["check"])
    printed, errors = capsys.readouterr()
    assert not printed
    assert errors.splitlines()[:3] == [
        "compiling [1/2] one",
        "compiling [2/2] other",
        "computing [1] linear of one tile",
    ]
