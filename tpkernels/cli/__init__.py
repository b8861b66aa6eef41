"""`python -m tpkernels COMMAND`: one module a command, each imported only when it is called."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from signal import SIGINT
from types import TracebackType
from typing import Any, NoReturn

from tpkernels import __version__
from tpkernels.files import parsed

COMMANDS = {
    "plan": "print and draw the groups of a world, or choose them for a model; needs no GPU and no torch",
    "clock": "predict by a model what a kernel, or an op on several GPUs, takes; needs no GPU",
    "check": "compile the kernels and compute with them, without a GPU: exit code 1 on a regression",
    "doctor": "look at this installation and say what is wrong with it",
    "qualify": "try kernels, transports and graphs on the GPUs of this machine, or on its CPU",
    "train": "train a GPT on ranks of this machine, or under torchrun",
    "tune": "time who computes each step of a layer fastest on this GPU, and remember it",
}
SAID_EVERY = 15.0  # seconds, of how far a command is, in a log
MOST_RANKS = 10_000_000  # more than any machine has, and described in seconds


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
    """`python -m PROGRAM COMMAND`, each command the `main` of a module of `package`; alone it lists them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--version", action="version", version=f"tpkernels {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in commands.items():
        # everything after the name is the command's own business
        choices.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_known_args(arguments[:1])[0].command
    if command is None:
        parser.print_help()
        return 0
    try:
        code: int = import_module(f"{package}.{command}").main(arguments[1:])
    except ModuleNotFoundError as error:  # some import what they need once they have read their arguments
        if (error.name or "").startswith(package.split(".")[0]):  # our own mistake
            raise
        parser.error(f"{command} needs {error.name}, which is not installed")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + SIGINT
    return code


def written_to(text: str) -> Path:
    """An argument that names a file to write: refused before the work, not after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"cannot write to {text!r}")
    return path


def require_ranks(option: str, count: int) -> None:
    if count > MOST_RANKS:
        raise ValueError(f"{option}: expected at most {MOST_RANKS}, got {count}")


def size_of(text: str) -> tuple[str, Any]:
    """`--size NAME=VALUE`"""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--size: expected NAME=VALUE, got {text!r}")
    try:
        return name, parsed(value)
    except ValueError:
        return name, value  # a word, such as swiglu


class Progress:
    """Says on standard error how far a long command is: on a terminal in one line that changes.

    `with Progress("compiling", total) as step: step("what was done")`; a total may be unknown.
    seconds: where standard error is no terminal, write a line after so many at the earliest; None: nothing
    """

    def __init__(self, verb: str, total: int | None = None, *, seconds: float | None = None) -> None:
        self.verb = verb
        self.total = total
        self.done = 0
        self.on_terminal = sys.stderr.isatty()
        self.seconds = seconds
        self.told = time.monotonic()

    def __enter__(self) -> Progress:
        if self.on_terminal:
            self._overwrite(self._line("..."))
        return self

    def __call__(self, what: object) -> None:
        self.done += 1
        if self.on_terminal:
            self._overwrite(self._line(what))
        elif self.seconds is not None and time.monotonic() - self.told >= self.seconds:
            self.told = time.monotonic()
            print(self._line(what), file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.on_terminal:
            self._overwrite("")
            sys.stderr.write("\r")

    def _line(self, what: object) -> str:
        return f"{self.verb} [{self.done}{'' if self.total is None else f'/{self.total}'}] {what}"

    def _overwrite(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{line[:width]:<{width}}")
        sys.stderr.flush()
