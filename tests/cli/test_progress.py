"""What a long command says of how far it is."""

import io

import pytest

from tpkernels.cli import Progress


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
