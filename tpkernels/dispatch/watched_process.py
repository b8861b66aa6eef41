"""A child process that cannot hold up its parent, whatever it does.

It reads and writes files without a name: no pipe can be full, or stay open in a grandchild. The parent asks
whether it has ended and what it has written, and never waits; at the end its process group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO

GONE_SECONDS = 10.0  # for a process that was killed: a driver may have to clean up behind it
WORDS = 2000  # bytes of stderr that are looked at


@contextmanager
def watched(command: Sequence[str], text: str, environment: Mapping[str, str]) -> Iterator[WatchedProcess]:
    """A child with this text on its stdin. OSError where no process or file can be made."""
    with TemporaryFile() as asked, TemporaryFile() as told, TemporaryFile() as errors:
        asked.write(text.encode())
        asked.seek(0)
        process = subprocess.Popen(
            list(command),
            stdin=asked,
            stdout=told,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,  # a group of its own, which no Ctrl-C reaches either
        )
        child = WatchedProcess(process, told, errors)
        try:
            yield child
        finally:
            child.end()


class WatchedProcess:
    """What a parent may do with its child without waiting for it."""

    def __init__(self, process: subprocess.Popen[bytes], told: IO[bytes], errors: IO[bytes]) -> None:
        self._process = process
        self._told = told
        self._errors = errors
        self._position = 0
        self._reaped_elsewhere = False  # then its number may be another process's by now
        self._unfinished = b""

    def ended(self) -> bool:
        """Whether it has; it is not reaped yet, so that its number still belongs to its group."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else reaps this process's children
            self._reaped_elsewhere = True
            return True

    def lines(self) -> list[str]:
        """Those that it has finished since the last call."""
        new = os.pread(self._told.fileno(), 1 << 20, self._position)  # `read` would move where it writes
        self._position += len(new)
        *finished, self._unfinished = (self._unfinished + new).split(b"\n")
        return [line.decode(errors="replace") for line in finished]

    def last_words(self) -> str:
        """The last line on its stderr: of a Python program that failed, its exception."""
        start = max(0, os.fstat(self._errors.fileno()).st_size - WORDS)
        tail = os.pread(self._errors.fileno(), WORDS, start).decode(errors="replace")
        return next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")

    def end(self) -> int | None:
        """Kill its group; its exit code, as `subprocess` has it, or None if it cannot be made to end."""
        if self._process.returncode is None:
            self.ended()  # looks whether it is still this process's to reap
            if not self._reaped_elsewhere:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_SECONDS)
        return self._process.returncode
