"""`python -m tpkernels COMMAND`: one module a command, each imported only when it is called.

The module of a command has `add_options(parser, words)`, with the words after the command's name, and
`main(options)`, which returns the exit code. A `BadUse` is reported in one line with exit code 2.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from tpkernels import __version__
from tpkernels.files import parsed

if TYPE_CHECKING:
    from argparse import _ActionsContainer

COMMANDS = {
    "plan": "print and draw the groups of a world, or choose them for a model; needs no GPU and no torch",
    "check": "compile the kernels and compute with them, without a GPU: exit code 1 on a regression",
    "doctor": "look at this installation and say what is wrong with it",
    "qualify": "try kernels and transports on the GPUs of this machine, or on its CPU",
    "train": "train a GPT on ranks of this machine, or under torchrun",
    "typecheck": "check one step of a training script by types over its ranks, in one process",
    "tune": "time who computes each step of a layer fastest on this GPU, and remember it",
}
USUAL_TOKENS = 8192  # that a rank computes at once, by default
SAID_EVERY = 15.0  # seconds between progress lines in a log
EXIT_CODES = "Exit codes: 0 all is well, 1 something is not, 2 bad use."


class OneLineParser(ArgumentParser):
    """Reports a bad argument in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class BadUse(ValueError):
    """Invalid arguments of a command; its text is the reported line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run_command("tpkernels", "Tensor-parallel kernels for PyTorch.", COMMANDS, "tpkernels.cli", argv)


def run_command(
    program: str, description: str, commands: Mapping[str, str], package: str, argv: Sequence[str] | None
) -> int:
    """Run `python -m PROGRAM COMMAND ...` and return its exit code; without a command list them.

    commands: the purpose of each command by name, which is a module of `package`
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--version", action="version", version=f"tpkernels {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in commands.items():
        # the command itself parses all words after its name
        choices.add_parser(name, help=purpose, add_help=False)
    command, words = parser.parse_known_args(arguments[:1])[0].command, arguments[1:]
    if command is None:
        parser.print_help()
        return 0
    purpose = commands[command]
    described = f"{purpose[0].upper()}{purpose[1:]}."
    own = OneLineParser(prog=f"{parser.prog} {command}", description=described, epilog=EXIT_CODES)
    try:
        module = import_module(f"{package}.{command}")
        own.set_defaults(words=words)
        module.add_options(own, words)
        code: int = module.main(own.parse_args(words))
    except BadUse as error:
        own.error(str(error))
    except ModuleNotFoundError as error:  # some commands import packages after they have read their arguments
        if (error.name or "").startswith(package.split(".")[0]):  # our own mistake
            raise
        parser.error(f"{command} needs {error.name}, which is not installed")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + SIGINT
    return code


@contextmanager
def bad_use_if(*errors: type[Exception]) -> Iterator[None]:
    """Turn errors of these types into `BadUse` with the same text."""
    try:
        yield
    except errors as error:
        raise BadUse(str(error)) from error


def require_packages(*names: str) -> None:
    """Raise ModuleNotFoundError for the first package that is not installed, without importing any."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(name=name)


def add_number(
    parser: _ActionsContainer,
    name: str,
    told: str,
    default: int | None = None,
    *,
    least: int | None = None,
    **more: Any,
) -> None:
    """Add an option that takes a whole number, not below `least`; its help shows the default."""
    usual = "" if default is None else f" (default {default})"
    kind = int if least is None else partial(_at_least, least)
    parser.add_argument(
        name, **{"type": kind, "default": default, "metavar": "N", "help": told + usual} | more
    )


def _at_least(least: int, text: str) -> int:
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"expected at least {least}, got {text}")
    return int(text)


def written_to(text: str) -> Path:
    """Return the path of a file to write, from an argument; refuse it before the work if not writable."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"cannot write to {text!r}")
    return path


def write_json(path: Path | None, content: object) -> None:
    """Write a command's results as JSON, if it was given a path."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def size_of(text: str) -> tuple[str, Any]:
    """Return name and value of `--size NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--size: expected NAME=VALUE, got {text!r}")
    try:
        return name, parsed(value)
    except ValueError:
        return name, value  # a word, such as swiglu


class Progress:
    """Shows the progress of a long command on standard error: on a terminal in one changing line.

    `with Progress("compiling", total) as step: step("what was done")`; a total may be unknown.
    seconds: without a terminal, write a line at most every `seconds`; None: no lines
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
