"""A child process that cannot block its parent, and the words for how it ended, or what it raised.

It reads and writes files without a name: no pipe can be full, or stay open in a grandchild. The parent polls
its end and its output, and never waits for either; at the end the child's process group is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from tempfile import TemporaryFile
from typing import IO

GONE_SECONDS = 10.0  # for a process that was killed: a driver may have to clean up behind it
POLL_SECONDS = 0.02
WORDS = 4000  # bytes of stderr that are looked at
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def ending(code: int) -> str:
    """Return in words how a process with this exit code ended.

    >>> ending(7), ending(-9), ending(-40)
    ('with exit code 7', 'by SIGKILL', 'by signal 40')
    """
    if code >= 0:
        return f"with exit code {code}"
    return "by " + {int(one): one.name for one in signal.Signals}.get(-code, f"signal {-code}")


def one_line_error(error: BaseException) -> str:
    """In one line: the first cause, and its last words."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def end_with_parent() -> None:
    """On Linux, let the kernel kill this process, even if stopped, when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)


@contextmanager
def started(
    command: Sequence[str], text: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Start a child with this text on its stdin; OSError if no process or file can be made."""
    with TemporaryFile() as asked, TemporaryFile() as told, TemporaryFile() as errors:
        asked.write(text.encode())
        asked.seek(0)
        process = subprocess.Popen(
            list(command),
            stdin=asked,
            stdout=told,
            stderr=errors,
            env=environment,
            start_new_session=True,  # a group of its own, which no Ctrl-C reaches either
        )
        child = Child(process, told, errors)
        try:
            yield child
        finally:
            child.end()


class Child:
    """A parent's view of its child, without waits."""

    def __init__(self, process: subprocess.Popen[bytes], told: IO[bytes], errors: IO[bytes]) -> None:
        self._process = process
        self._told = told
        self._errors = errors
        self._position = 0
        self._reaped_elsewhere = False  # then its number may be another process's by now
        self._unfinished = b""

    def ended(self) -> bool:
        """Whether the child has ended; it is not reaped yet, so its number still belongs to its group."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else reaps this process's children
            self._reaped_elsewhere = True
            return True

    def lines(self) -> list[str]:
        """Return the complete lines of output since the last call."""
        new = os.pread(self._told.fileno(), 1 << 20, self._position)  # `read` would move where it writes
        self._position += len(new)
        *finished, self._unfinished = (self._unfinished + new).split(b"\n")
        return [line.decode(errors="replace") for line in finished]

    def lines_until_end(self, seconds: float = inf) -> Iterator[str]:
        """Yield complete lines of output as they come; TimeoutError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.ended()  # asked first, so that no line is missed
            size = os.fstat(self._told.fileno()).st_size  # of now: a grandchild may go on for ever
            while self._position < size:
                yield from self.lines()
            if ended:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"took more than {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def last_words(self, count: int = 1) -> str:
        """Return the last lines on stderr: of a failed Python program, its exception."""
        start = max(0, os.fstat(self._errors.fileno()).st_size - WORDS)
        tail = os.pread(self._errors.fileno(), WORDS, start).decode(errors="replace")
        return "; ".join([line.strip() for line in tail.splitlines() if line.strip()][-count:])

    def end(self) -> int | None:
        """Kill the child's group; return its exit code, as in `subprocess`, or None if it does not end."""
        if self._process.returncode is None:
            self.ended()  # looks whether it is still this process's to reap
            if not self._reaped_elsewhere:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_SECONDS)
        return self._process.returncode
