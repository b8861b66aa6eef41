"""Which machine this is, and whether the process of another rank on it still runs."""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary, finalize

LOOK_SECONDS = 0.2  # between two looks, of who waits for it


class Process:
    """A process that ran when this object was made. One that has ended and is not reaped counts as ended."""

    def __init__(self, number: int) -> None:
        self._number, self._started = number, _start_of(number)
        self._ends: select.poll | None = None
        with suppress(AttributeError, OSError):  # an old kernel, or a sandbox, has none
            descriptor = os.pidfd_open(number)
            finalize(self, os.close, descriptor)
            self._ends = select.poll()
            self._ends.register(descriptor, select.POLLIN)

    def has_ended(self) -> bool:
        if self._ends is not None:
            return bool(self._ends.poll(0))
        return not self._started or _start_of(self._number) != self._started


def machine() -> str:
    """Return a text that is equal for processes that see each other on one machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


_known: WeakValueDictionary[int, Process] = WeakValueDictionary()  # exchanges share a descriptor a process


def process_of(number: int) -> Process:
    """Return the process that has this number now."""
    process = _known.get(number)
    if process is None or process.has_ended():
        process = _known[number] = Process(number)
    return process


def _start_of(number: int) -> str:
    """When a process started, which tells it from a later one of its number; nothing if it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
