"""`python -m tpkernels COMMAND`: one module a command, each imported only when it is called."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from signal import SIGINT
from typing import Any, NoReturn

COMMANDS = {
    "plan": "print and draw the groups of a world, or choose them for a model; needs no GPU and no torch",
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
    return run_command("tpkernels", "Tensor-parallel kernels for PyTorch.", COMMANDS, "tpkernels.cli", argv)


def run_command(
    program: str, description: str, commands: Mapping[str, str], package: str, argv: Sequence[str] | None
) -> int:
    """`python -m PROGRAM COMMAND`, each command the `main` of a module of `package`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog=f"python -m {program}", description=description)
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in commands.items():
        # everything after the name is the command's own business
        choices.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_known_args(arguments[:1])[0].command
    try:
        code: int = _module(parser, package, command).main(arguments[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + SIGINT
    return code


def _module(parser: OneLineParser, package: str, command: str) -> Any:
    try:
        return import_module(f"{package}.{command}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(package.split(".")[0]):  # our own mistake
            raise
        parser.error(f"{command} needs {error.name}, which is not installed")


def written_to(text: str) -> Path:
    """An argument that names a file to write: refused before the work, not after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"cannot write to {text!r}")
    return path
