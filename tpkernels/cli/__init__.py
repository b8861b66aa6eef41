"""`python -m tpkernels COMMAND`: one module a command, each imported only when it is called."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "plan": "print and draw the groups of a world; needs no GPU and no torch",
    "check": "compile the kernels and compute with them, without a GPU: exit code 1 on a regression",
    "doctor": "look at this installation and say what is wrong with it",
    "train": "train a GPT on ranks of this machine, or under torchrun",
    "tune": "time who computes each step of a layer fastest on this GPU, and remember it",
}


class OneLineParser(ArgumentParser):
    """Reports a bad argument in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog="python -m tpkernels", description="Tensor-parallel kernels for PyTorch.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        # everything after the name is the command's own business
        commands.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_known_args(arguments[:1])[0].command
    code: int = import_module(f"tpkernels.cli.{command}").main(arguments[1:])
    return code
