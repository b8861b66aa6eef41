"""The line that shows how far a long command is."""

import io

import pytest

from tpkernels.cli import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_progress_is_for_terminals_only(stream, shown, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("compiling", 2) as step:
        step("one")
        step("two")
    assert ("compiling [2/2] two" in stream.getvalue()) is shown
    assert shown is bool(stream.getvalue())
