"""A progress bar on a terminal; nothing where output goes to a file."""

from __future__ import annotations

import sys
from typing import TextIO

WIDTH = 30


class Progress:
    """`[######      ] 3/14 what is being done`, on one line that `clear` wipes."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._done = 0
        self._stream = sys.stderr if stream is None else stream

    def begin(self, what: str) -> None:
        """Show what is done next."""
        filled = WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + " " * (WIDTH - filled)
        self._show(f"[{bar}] {self._done}/{self._total} {what}"[:120])
        self._done += 1

    def clear(self) -> None:
        """Leave the line to whatever is printed next."""
        self._show("")

    def _show(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r\033[K{text}")  # back to the start of the line, and wipe it
            self._stream.flush()
