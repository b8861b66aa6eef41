"""What `python -m tpkernels` says of its commands, and what these have in common."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

from tests.patience import patient
from tests.topology.test_plan import DESCRIPTION
from tpkernels import __version__, cli
from tpkernels.cli import COMMANDS, main, train


def test_alone_it_lists_the_commands(capsys):
    assert main([]) == 0
    printed, errors = capsys.readouterr()
    assert not errors
    assert all(f"\n    {name} " in printed for name in COMMANDS)


def test_version_is_told(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"tpkernels {__version__}\n"


def test_former_names_of_options_are_understood():
    assert doctest.testmod(cli).failed == 0


def test_help_of_train_has_the_default_of_every_option():
    """In words where the parser has none, and else as it is."""
    for action in train._parser()._actions:
        if action.dest in ("help", "data"):
            continue
        said = action.help or ""
        assert "default" in said, action.option_strings
        if action.nargs != 0 and action.default not in (None, []):
            assert f"default {action.default}" in said or f"default {action.default!r}" in said


WITHOUT_TORCH = [
    "plan --world-size 16 --tp 2 --pp 4",
    "plan --model llama3-70b --world-size 64 --gpu h100",
    "clock column_linear --tokens 2048 --in 4096 --out 14336 --tp 4",
]
PROGRAM = """
import sys
from tpkernels.cli import main

for command in sys.argv[1:]:
    assert main(command.split()) == 0
    assert "torch" not in sys.modules, command
"""


def test_what_is_planned_loads_no_torch():
    command = [sys.executable, "-c", PROGRAM, *WITHOUT_TORCH]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=True).stdout
    assert printed.startswith(DESCRIPTION)
