"""What `python -m tpkernels` says of its commands, and what these have in common."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from tests.groups.test_plan import DESCRIPTION
from tests.patience import patient
from tpkernels import __version__
from tpkernels.cli import COMMANDS, Progress, main


def test_alone_it_lists_the_commands(capsys):
    assert main([]) == 0
    printed, errors = capsys.readouterr()
    assert not errors
    assert all(re.search(rf"\n    {name}\s", printed) for name in COMMANDS)


def test_version_is_told(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"tpkernels {__version__}\n"


WITHOUT_TORCH = [
    "plan --world-size 16 --tp 2 --pp 4",
    "plan --world-size 64 --model llama3-70b --gpu h100",
    "plan --world-size 1024 --model llama3-8b --reshard tp=8 tp=4",
    *(f"{command} --help" for command in COMMANDS if command not in ("check", "train", "tune", "typecheck")),
]
PROGRAM = """
import sys
from tpkernels.cli import main

for command in sys.argv[1:]:
    try:
        assert main(command.split()) == 0
    except SystemExit as help:
        assert help.code == 0
    assert "torch" not in sys.modules, command
"""


def test_plans_and_arguments_load_no_torch():
    command = [sys.executable, "-c", PROGRAM, *WITHOUT_TORCH]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=True).stdout
    assert printed.startswith(DESCRIPTION)


LESSON = ["plan", "--world-size", "16", "--tp", "2", "--pp", "4"]


def test_plan_prints_the_lesson_draws_it_and_takes_every_option(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    assert main([*LESSON, "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(DESCRIPTION)
    assert printed.endswith(f"drawn into {picture}\n")
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert main([*LESSON, "--rank", "6"]) == 0
    printed = capsys.readouterr().out
    assert "rank 6 of 16" in printed
    assert "1 of 4 in [g2, g6, g10, g14]" in printed
    assert "not a member" in printed
    options = "--world-size 32 --tp 2 --cp 2 --ep 2 --pp 4 --virtual-pipeline 2 --split-rank 2"
    assert main(["plan", *options.split(), "--order", "tp-cp-ep-dp-pp"]) == 0
    assert "2 virtual stages on each rank, decoder from stage 2" in capsys.readouterr().out


LINES = ["compiling [1/3] one", "compiling [2/3] two", "compiling [3/3] three"]


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
    assert [line.strip() for line in others] == [*LINES, "", ""]


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (None, []),
        (5, LINES),
        (15, LINES[1:2]),
        (60, []),
    ],
)
def test_elsewhere_a_line_is_written_after_so_many_seconds(seconds, lines, monkeypatch, clock):
    assert told(io.StringIO(), monkeypatch, clock, seconds=seconds).splitlines() == lines
