"""What this rank does in its process groups, for those who find a run that hangs.

    text = tpkernels.dump_calls()

TPKERNELS_DUMP=1, read where a rank uses its first process group, has it written to stderr, with the stacks of
all threads: each time the process gets SIGUSR2, and once if a group fails (rows came too late, the device has
an error, torch's watchdog of NCCL or another rank has failed, Ctrl-C).

The main thread of a rank that hangs waits in C++, where no handler in Python runs. So the handler is that of
faulthandler: it writes into a pipe, whatever the main thread does, and a thread reads from it. That one needs
Python's lock: a library that keeps it while it waits delays the dump.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import string_at
from pathlib import Path
from socket import gethostname

import torch.distributed as dist
from torch import Tensor

from tpkernels.comm.calls import (
    CALLS_OF,
    HEADER_BYTES,
    Calls,
    on_failure,
    place_of,
    read_header,
)
from tpkernels.comm.transports.memory import SharedMemory, Words
from tpkernels.env import env_flag

LONGEST_READ = 1.0  # seconds for the flags of all memory: a GPU that hangs may never copy them
_STDERR = 2
_SETTLED = 0.1  # seconds in which the handler has written all of its lines


def dump_calls() -> str:
    """Return what this rank does in its process groups: a text of several lines, for people.

    Of each group the last 64 calls, which of them are in flight over gloo, which call each peer has begun as
    far as this rank knows, and the flags of memory that ranks share. It waits for a GPU for a second at most.
    Any thread may call it, but none while a CUDA graph is captured: reading flags ends a capture.
    """
    deadline = time.monotonic() + LONGEST_READ
    world = f", rank {dist.get_rank()} of the world" if dist.is_initialized() else ""
    lines = [f"process {os.getpid()} on {gethostname()}{world}"]
    for calls in list(CALLS_OF.values()):
        if calls.latest and calls.group_is_alive():
            lines += _described(calls, deadline)
    return "\n".join(lines)


def _described(calls: Calls, deadline: float) -> Iterator[str]:
    yield f"process group '{calls.name}': rank {calls.rank} of {calls.ranks}"
    if calls.failure:
        yield f"  it has failed: {calls.failure}"
    in_flight = dict(calls.in_flight)
    for number, described in list(calls.latest):
        receives = in_flight.get(number)
        yield f"  call {number} {described}" + ("" if receives is None else ", in flight")
        if receives is not None:
            headers, chunks = receives[: len(calls.peers)], receives[len(calls.peers) :]
            for peer, message, _ in headers:
                if _number_in(message) != number:
                    yield f"    rank {peer} has not begun it"
            # gloo says that a receive has ended once the host has waited for it
            if away := [peer for peer, _, work in chunks if not work.is_completed()]:
                yield f"    {len(away)} of {len(chunks)} chunks are awaited, the next is of rank {away[0]}"
    for peer in calls.peers:
        if header := _last_header(calls, peer):
            (number, *_), text = read_header(header)
            yield f"  rank {peer} has begun call {number} {text}"
    for memory in list(calls.memory):
        words, problem = _words_of(memory, deadline)
        for line in [*memory.state(words), *filter(None, [problem])]:
            yield f"  {line}"


def _number_in(message: Tensor) -> int:
    """Return the number of the call in a message; 0 if nothing has come."""
    return int.from_bytes(string_at(message.data_ptr(), 8), "little")


def _last_header(calls: Calls, peer: int) -> bytes:
    """Return the header of the last call that another rank is known to have begun; nothing if none is."""
    if page := calls.pages.get(peer):
        return page[place_of(int.from_bytes(page[:8], "little"))]
    receives = [*calls.in_flight.values(), *list(calls.posted)]
    messages = [own[calls.peers.index(peer)][1] for own in receives]
    last = max(messages, key=_number_in, default=None)
    return string_at(last.data_ptr(), HEADER_BYTES) if last is not None and _number_in(last) else b""


def _words_of(memory: SharedMemory, deadline: float) -> tuple[Words | None, str]:
    """Return the words of shared memory, or why they cannot be read. A thread asks: it may wait for ever."""
    found: list[tuple[Words | None, str]] = []

    def read() -> None:
        try:
            found.append((memory.words(), ""))
        except Exception as error:  # such as an error of the device
            found.append((None, f"flags are not readable: {error}"))

    if (left := deadline - time.monotonic()) > 0:
        thread = threading.Thread(target=read, name="tpkernels dump of flags", daemon=True)
        thread.start()
        thread.join(left)
    late = f"flags are not readable: the device has not answered for {LONGEST_READ:g} s"
    return found[0] if found else (None, late)


class _Dumps:
    """Writes dumps of this process to stderr."""

    def __init__(self) -> None:
        self._process = 0  # which has the handler
        self._has_failed = False
        self._pipe = -1, -1

    def install(self) -> None:
        """Write a dump at each SIGUSR2, and once if a group fails."""
        if self._process == os.getpid():
            return
        if not self._process:
            on_failure.append(self.write_failure)
            os.register_at_fork(after_in_child=self._part_from_parent)
        self._process, self._has_failed = os.getpid(), False
        handler = signal.getsignal(signal.SIGUSR2)
        if handler is signal.SIG_DFL and _is_caught(signal.SIGUSR2) and self._pipe[1] < 0:
            logging.getLogger("tpkernels.comm").warning(
                "TPKERNELS_DUMP=1: SIGUSR2 has a handler of another library, which is left; call "
                "tpkernels.dump_calls() where you want a dump"
            )
            return
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)  # the handler may have Python's lock, without which nobody reads
        faulthandler.register(signal.SIGUSR2, writer, all_threads=False, chain=handler is not signal.SIG_DFL)
        threading.Thread(target=self._serve, args=(reader,), name="tpkernels dump", daemon=True).start()

    def write_failure(self, cause: str) -> None:
        """Write a dump of the first failure."""
        if not self._has_failed and self._process == os.getpid():
            self._has_failed = True
            self._write(f"a call has failed: {cause}")

    def _serve(self, reader: int) -> None:
        while os.read(reader, 2**16):
            time.sleep(_SETTLED)
            os.set_blocking(reader, False)
            with suppress(BlockingIOError):
                os.read(reader, 2**20)
            os.set_blocking(reader, True)
            self._write("SIGUSR2")

    def _write(self, why: str) -> None:
        try:
            text = dump_calls()
        except Exception as error:  # in a process that is in trouble already
            text = f"no dump: {error!r}"
        with suppress(OSError), open(_STDERR, "w", closefd=False) as stderr:
            stderr.write(f"tpkernels: dump ({why})\n{text}\n")
            stderr.flush()
            faulthandler.dump_traceback(stderr)

    def _part_from_parent(self) -> None:
        """In a fork, whose handler would wake the parent's thread: a signal does nothing there."""
        if self._pipe[1] >= 0:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._pipe[1])
            os.close(nowhere)


def _is_caught(number: int) -> bool:
    """Whether this process has a handler of a signal, also one in C."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


_DUMPS = _Dumps()


def install_if_asked() -> None:
    """Have dumps written, if TPKERNELS_DUMP=1 asks for them."""
    if env_flag("TPKERNELS_DUMP", default=False):
        _DUMPS.install()
