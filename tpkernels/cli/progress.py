"""One line on a terminal that says how far a long command is; nothing where nobody watches."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType


class Progress:
    """`with Progress("compiling", total) as step: step("what was done")`; a total may be unknown."""

    def __init__(self, verb: str, total: int | None = None) -> None:
        self.verb = verb
        self.total = total
        self.done = 0
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, what: object) -> None:
        self.done += 1
        if self.shown:
            width = shutil.get_terminal_size().columns - 1
            of_total = "" if self.total is None else f"/{self.total}"
            line = f"{self.verb} [{self.done}{of_total}] {what}"
            sys.stderr.write(f"\r{line[:width]:<{width}}")
            sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self.done:
            sys.stderr.write(f"\r{'':<{shutil.get_terminal_size().columns - 1}}\r")
