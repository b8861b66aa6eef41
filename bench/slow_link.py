"""Two ranks joined by a slow network, so that communication takes time on one machine without a GPU.

    if reason := why_not():
        pytest.skip(reason)
    with SlowLink(bits_per_second=1e9) as link:
        seconds = link.run(time_a_step)  # at module level, because it travels by name; one answer a rank
        link.set_rate(5e8)

Each rank lives in a network namespace of its own; a veth pair joins the two, with a token bucket at either
end. The namespaces have no names: they belong to the ranks, and the system takes them back with the last
process in them, whatever ends it. The ranks end with the process that started them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

START_SECONDS = 120.0  # an import of torch on a loaded machine, with room
GRACE_SECONDS = 5.0  # the peer of a rank that failed tells what it saw
_DEVICE = "tpk0"  # the name of either end, each in its own namespace
_CLONE_NEWNET = 0x40000000
_BURST = 128 * 1024  # bytes: two of the largest packets
_QUEUE = 16 * 2**20  # bytes: nothing is dropped, senders are held back


@cache
def why_not() -> str | None:
    """Why this machine cannot make a slow link; None if it can."""
    tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        return f"a slow link needs the commands {', '.join(tools)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "a slow link needs root: network namespaces and tc are not for others"
    attempt = f"ip link add {_DEVICE} type veth peer name tpk1 && {' '.join(_bucket('add', 1e6))}"
    probe = subprocess.run(["unshare", "--net", "sh", "-c", attempt], capture_output=True, text=True)
    if probe.returncode:
        return f"this machine does not let us make a slow link: {probe.stderr.strip()}"
    return None


class SlowLink:
    """Two ranks, one thread each, in one gloo group over the link, for as long as the context lasts."""

    def __init__(self, bits_per_second: float) -> None:
        self._rate = bits_per_second
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> SlowLink:
        if reason := why_not():
            raise RuntimeError(reason)
        context = multiprocessing.get_context("forkserver")  # one import of torch, for all links
        context.set_forkserver_preload(["torch._dynamo"])
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory()
        try:
            for rank in range(2):
                ours, theirs = context.Pipe()
                args = (rank, Path(self._folder.name, "store"), theirs, lifeline)
                process = context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()  # the rank now holds the only copy: its death is an end of file
                self._ranks.append((process, ours))
            lifeline.close()
            self._answers("entering its namespace", START_SECONDS)
            first, second = (str(process.pid) for process, _ in self._ranks)
            ends = ["name", _DEVICE, "netns", first, "type", "veth", "peer", "name", _DEVICE, "netns", second]
            _call("ip", "link", "add", *ends)
            self.run(_connect, self._rate, timeout=START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Call `function(*args)` on both ranks; the results in rank order. A failure ends the ranks."""
        if not self._ranks:
            raise RuntimeError("the link is closed: one of its ranks failed before, or the context has ended")
        call = pickle.dumps((function, args))
        try:
            for _, connection in self._ranks:
                with suppress(OSError):  # it died in the meantime, which is reported below
                    connection.send_bytes(call)
            return self._answers(function.__qualname__, timeout)
        except BaseException:  # also Ctrl-C: nobody knows what the ranks are doing then
            self.close()
            raise

    def set_rate(self, bits_per_second: float) -> None:
        """Change the rate of either direction."""
        self.run(throttle, bits_per_second)

    def close(self) -> None:
        """End the ranks, and with them the link and its namespaces."""
        for process, _ in self._ranks:
            process.kill()
        for process, connection in self._ranks:
            process.join()
            connection.close()
        self._ranks.clear()
        self._lifeline.close()
        self._folder.cleanup()

    def _answers(self, what: str, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while silent := {
            connection: rank
            for rank, (_, connection) in enumerate(self._ranks)
            if rank not in results and rank not in failures
        }:
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update({rank: "no answer in time" for rank in silent.values()})
            for connection, rank in silent.items():
                if connection not in ready:
                    continue
                try:
                    is_result, answer = connection.recv()
                except (EOFError, OSError):
                    is_result, answer = False, "died"
                if is_result:
                    results[rank] = pickle.loads(answer)
                else:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            stories = "\n".join(f"rank {rank}: {story}" for rank, story in failures.items())
            raise RuntimeError(f"{what} failed on {len(failures)} of 2 ranks\n{stories}")
        return [results[rank] for rank in range(2)]


def throttle(bits_per_second: float) -> None:
    """On a rank: change the rate of what it sends. For timings at several rates within one call."""
    _call(*_bucket("change", bits_per_second))


def _serve(rank: int, store: Path, connection: Connection, lifeline: Connection) -> None:
    """The whole life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us; the parent deals with it
    connection.send(_attempt(_leave_the_network))  # before there are threads, which would stay behind
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME=_DEVICE, RANK=str(rank), TPK_STORE=str(store))
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send(_attempt(function, *args))


def _leave_the_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")


def _connect(bits_per_second: float) -> None:
    """Bring this end of the link up, and join the other rank over it."""
    rank = int(os.environ["RANK"])
    _call("ip", "link", "set", "lo", "up")
    _call("ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", _DEVICE)
    _call("ip", "link", "set", _DEVICE, "up")
    _call(*_bucket("add", bits_per_second))
    # A file: it is seen from both namespaces, and nothing of it goes over the link.
    store = dist.FileStore(os.environ["TPK_STORE"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    dist.barrier()


def _bucket(verb: str, bits_per_second: float) -> list[str]:
    bucket = f"tbf rate {round(bits_per_second)}bit burst {_BURST} limit {_QUEUE}"
    return ["tc", "qdisc", verb, "dev", _DEVICE, "root", *bucket.split()]


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _attempt(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    try:
        return True, pickle.dumps(function(*args))
    except BaseException:  # SystemExit too: a rank answers every call
        return False, traceback.format_exc()


def _exit_with_parent(lifeline: Connection) -> None:
    """Nothing is ever sent: the pipe ends with the parent, even if that is killed. Then nobody needs us."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
