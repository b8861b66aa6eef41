"""The ranks that `bench bits` runs on, as the process sees them that starts, stops and compares them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple, NoReturn

from bench.bits.schedule import Stop, drawn
from tpkernels.gate.child import ending
from tpkernels.training.launch import environment_of_ranks, loopback_store

PATIENCE = 120.0  # seconds for one program under one schedule
START_SECONDS = 120.0  # to import torch, and to meet
PROGRAM = "bench.bits.rank"

Digests = dict[str, str]  # of each tensor of a rank, by name


class Task(NamedTuple):
    """One program over one transport, once."""

    transport: str
    program: str
    seed: int | None  # of the schedule; None: undisturbed


class RankFailure(RuntimeError):
    """A rank raised, died, or did not answer in time. None of them runs any more."""


class _Event(NamedTuple):
    at: float  # seconds since the task was given out
    rank: int
    signal: signal.Signals


class Ranks:
    """So many processes, started by the first task, and by the first after a failure."""

    def __init__(self, count: int, planted: Sequence[str] = (), patience: float = PATIENCE) -> None:
        """planted: `module:function` that each rank calls first, so that tests can plant faults"""
        self.count, self._planted, self._patience = count, tuple(planted), patience
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, task: Task) -> list[Digests]:
        """What each rank has computed, some of them stopped for a moment as the schedule says."""
        stops = () if task.seed is None else drawn(task.seed, task.program, self.count).stops
        try:
            if not self._processes:
                self._start()
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send(tuple(task))
                except OSError:  # the rank has died, which is found and told below
                    self._died(rank)
            return self._answers(_events(stops), self._patience)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill them all, also those that are stopped."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        self._store = loopback_store()  # lives as long as they do
        common = os.environ | environment_of_ranks(self._store, self.count) | {"TRITON_INTERPRET": "1"}
        for rank in range(self.count):
            ours, theirs = Pipe()
            self._connections.append(ours)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(theirs.fileno()), *self._planted],
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()  # the rank now holds the only copy: its death is an end of file
        self._answers([], START_SECONDS)

    def _answers(self, events: list[_Event], patience: float) -> list[Digests]:
        answers: dict[int, Digests] = {}
        began = time.monotonic()
        try:
            while silent := [rank for rank in range(self.count) if rank not in answers]:
                now = time.monotonic() - began
                if now > patience:
                    names = " and ".join(map(str, silent))
                    raise RankFailure(f"hang: rank {names} did not end within {patience:g} s")
                while events and events[0].at <= now:
                    event = events.pop(0)
                    self._processes[event.rank].send_signal(event.signal)
                until = min(events[0].at if events else patience, patience)
                ready = wait([self._connections[rank] for rank in silent], max(0.0, until - now) + 1e-3)
                for rank in silent:
                    if self._connections[rank] in ready:
                        answers[rank] = self._answer(rank)
        finally:
            for event in events:
                if event.signal is signal.SIGCONT:
                    self._processes[event.rank].send_signal(event.signal)
        return [answers[rank] for rank in range(self.count)]

    def _answer(self, rank: int) -> Digests:
        try:
            answer = self._connections[rank].recv()
        except (EOFError, OSError):
            self._died(rank)
        if isinstance(answer, str):
            raise RankFailure(f"rank {rank}: {answer}")
        found: Digests = answer
        return found

    def _died(self, rank: int) -> NoReturn:
        code = self._processes[rank].wait()
        raise RankFailure(f"rank {rank} {'was killed' if code < 0 else 'ended'} {ending(code)}")


def _events(stops: Sequence[Stop]) -> list[_Event]:
    """In the order of time. A rank that is stopped twice goes on at the first SIGCONT."""

    def both(stop: Stop) -> Iterator[_Event]:
        yield _Event(stop.after, stop.rank, signal.SIGSTOP)
        yield _Event(stop.after + stop.seconds, stop.rank, signal.SIGCONT)

    return sorted(event for stop in stops for event in both(stop))
