"""The adversary of `bench bits`: what a seed draws, and how a rank is made to keep to it.

It decides when things happen, and in which order where the transports leave that open. Memory that rows are
to arrive in it fills with NaN: what lies there are the same numbers, of the run before. All ranks and the
process that started them draw the same from a seed, and each rank its own pauses.

    late      a rank comes to its program, and to each call, so much after the others
    pauses    before a call begins, before a chunk is sent or copied, between a chunk and its flag, before a
              rank says that it has read, in the middle of a backward, at atomics of interpreted kernels
    sends     chunks leave in another order: to other ranks first, or all at the end
    waits     chunks are awaited in another order
    busy      a thread that holds Python's lock, or one that multiplies, for a while
    stops     SIGSTOP, and some time later SIGCONT, by a process of its own
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from tpkernels.comm.calls import Call, Calls
from tpkernels.comm.schedule import Round, slot_of
from tpkernels.comm.transports import host
from tpkernels.comm.transports.c10d import PointToPoint
from tpkernels.comm.transports.mailbox import MailboxDelivery
from tpkernels.comm.transports.rows import Gather, Reduce

T = TypeVar("T")

ORDERS = ("planned", "reversed", "shuffled")
LONGEST_STOP, LONGEST_BURST = 0.03, 0.02  # seconds
ATOMICS_SHARE = 0.02  # of the pauses that others make: a kernel that waits looks again and again


class Stop(NamedTuple):
    """A rank is stopped for a moment."""

    after: float  # seconds since its program began
    rank: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """One draw."""

    name: str  # of what it was drawn from
    late: tuple[float, ...]  # seconds, by rank
    rate: float  # how likely a pause is
    longest: float  # seconds of a pause
    sends: str  # one of ORDERS
    waits: str
    busy: tuple[str, ...]  # "", "lock" or "product", by rank
    stops: tuple[Stop, ...]


def drawn(seed: int, program: str, ranks: int) -> Schedule:
    """The schedule of a seed; each program has its own."""
    name = f"{seed} {program} {ranks}"
    draw = random.Random(name)
    apart = draw.choice([0.0, 0.0, 1e-3, 5e-3])
    first = draw.sample(range(ranks), ranks)  # who comes first
    return Schedule(
        name=name,
        late=tuple(apart * first.index(rank) for rank in range(ranks)),
        rate=draw.choice([0.0, 0.1, 0.3]),
        longest=draw.choice([3e-4, 1e-3, 4e-3]),
        sends=draw.choice(ORDERS),
        waits=draw.choice(ORDERS),
        busy=tuple(draw.choice(["", "", "lock", "product"]) for _ in range(ranks)),
        stops=tuple(
            Stop(draw.uniform(0, 0.05), draw.randrange(ranks), draw.uniform(1e-3, LONGEST_STOP))
            for _ in range(draw.choice([0, 0, 1, 2]))
        ),
    )


@contextmanager
def imposed(schedule: Schedule, rank: int) -> Iterator[Callable[[], None]]:
    """Until the end this process keeps to the schedule as rank `rank`; gives what makes a pause."""
    adversary = _Adversary(schedule, rank)
    with ExitStack() as stack:
        for owner, name, replacement in adversary.seams():
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(_busy(schedule.busy[rank]))
        for stop in schedule.stops:
            if stop.rank == rank:
                stack.enter_context(_stopped(stop))
        time.sleep(schedule.late[rank])
        yield adversary.pause


class _Adversary:
    """On one rank."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule, self._late = schedule, schedule.late[rank]
        self._draw = random.Random(f"{schedule.name} {rank}")
        self._held: dict[int, list[tuple[int, Callable[[], object]]]] = {}  # by call: what is not sent yet

    def pause(self, share: float = 1.0) -> None:
        if self._draw.random() < share * self._schedule.rate:
            time.sleep(self._draw.uniform(0, self._schedule.longest))

    def ordered(self, things: Iterable[T], order: str) -> list[T]:
        listed = list(things)
        if order == "reversed":
            listed.reverse()
        elif order == "shuffled":
            self._draw.shuffle(listed)
        return listed

    def seams(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """What is replaced: (owner, name, by what)."""
        yield Calls, "begin", self._before(Calls.begin, self._late)
        yield Call, "announce", self._announced(Call.announce)
        yield Call, "send", self._sent(Call.send)
        yield Call, "receive", self._received(Call.receive)
        yield Call, "confirm", self._before(Call.confirm)
        for name in ("gather", "reduce"):
            yield PointToPoint, name, self._moved(getattr(PointToPoint, name))
        yield Gather, "all", self._in_any_order(Gather.all)
        yield Reduce, "wait", self._in_any_order(Reduce.wait)
        yield host.HostDelivery, "move", self._pushed(host.HostDelivery.move)
        yield host.HostDelivery, "keep", self._kept(host.HostDelivery.keep)
        yield MailboxDelivery, "await_rows", _method(self._awaited)
        yield host, "_copy", self._around(host._copy)
        yield host.HostExchange, "released", self._released(host.HostExchange.released)
        if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
            builder = interpreter.InterpreterBuilder
            atomic = builder.create_atomic_rmw
            yield builder, "create_atomic_rmw", self._before(atomic, share=ATOMICS_SHARE)

    def _before(self, function: Callable[..., T], late: float = 0.0, share: float = 1.0) -> Callable[..., T]:
        def paused(*args: Any, **options: Any) -> T:
            if late:
                time.sleep(late / 10)
            self.pause(share)
            return function(*args, **options)

        return paused

    def _around(self, function: Callable[..., T]) -> Callable[..., T]:
        """And after it: flags come later than their rows."""

        def paused(*args: Any) -> T:
            self.pause()
            result = function(*args)
            self.pause()
            return result

        return paused

    def _released(self, released: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        """Its owner has read a slot; nobody writes there until he says so."""

        def poisoned(exchange: Any, number: int) -> None:
            _poison(exchange.memories[slot_of(number)])
            self.pause()
            released(exchange, number)

        return poisoned

    def _announced(self, announce: Callable[..., None]) -> Callable[..., None]:
        """Headers leave in another order; receives stay in that of peers."""

        def announced(call: Call, *rows: Any, **by_peer: Any) -> None:
            self.pause()
            calls = call.calls
            calls.post_receives(call.group, 1)
            peers, calls.peers = calls.peers, self.ordered(calls.peers, self._schedule.sends)
            try:
                announce(call, *rows, **by_peer)
            finally:
                calls.peers = peers

        return announced

    def _sent(self, send: Callable[[Call, Tensor, int], None]) -> Callable[[Call, Tensor, int], None]:
        def sent(call: Call, rows: Tensor, peer: int) -> None:
            self._hold(call, peer, lambda: send(call, rows, peer))

        return sent

    def _received(
        self, receive: Callable[[Call, Tensor, int], Callable[[], T]]
    ) -> Callable[[Call, Tensor, int], Callable[[], T]]:
        def received(call: Call, rows: Tensor, peer: int) -> Callable[[], T]:
            _poison(rows)
            return self._before(receive(call, rows, peer))

        return received

    def _pushed(self, move: Callable[..., None]) -> Callable[..., None]:
        def pushed(delivery: MailboxDelivery, round: Round, outgoing: Tensor, first_row: int) -> None:
            for number, swap in enumerate(round.swaps, self._count(delivery)):
                alone = replace(round, swaps=(swap,))
                self._hold(delivery, number, partial(move, delivery, alone, outgoing, first_row))

        return pushed

    def _hold(self, call: object, turn: int, send: Callable[[], object]) -> None:
        """Send now, or when the call has moved all; what bears one turn keeps its order."""
        if self._schedule.sends == "planned":
            self.pause()
            send()
        else:
            self._held.setdefault(id(call), []).append((turn, send))

    def _count(self, call: object) -> int:
        return len(self._held.get(id(call), ()))

    def _send_held(self, call: object) -> None:
        by_turn: dict[int, list[Callable[[], object]]] = {}
        for turn, send in self._held.pop(id(call), []):
            by_turn.setdefault(turn, []).append(send)
        for sends in self.ordered(by_turn.values(), self._schedule.sends):
            for send in sends:
                self.pause()
                send()

    def _moved(self, move: Callable[..., T]) -> Callable[..., T]:
        """Messages from one rank to another bear one tag: they keep their order."""

        def moved(transport: PointToPoint, call: Call, *args: Any, **options: Any) -> T:
            moving = move(transport, call, *args, **options)
            self._send_held(call)
            return moving

        return moved

    def _kept(self, keep: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
        """The call has moved all."""

        def kept(delivery: Any, rows: Tensor) -> None:
            self._send_held(delivery)
            keep(delivery, rows)

        return kept

    def _in_any_order(self, wait: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What arrives is awaited in another order, if all is awaited."""

        def waited(moving: Any, *args: Any) -> Tensor:
            self.pause()
            moving._arriving = self.ordered(moving._arriving, self._schedule.waits)
            return wait(moving, *args)

        return waited

    def _awaited(self, delivery: MailboxDelivery, rows: slice) -> None:
        self.pause()
        for chunk in self.ordered(delivery.exchange.chunk_numbers(rows), self._schedule.waits):
            delivery.await_chunk(chunk)


def _poison(memory: Tensor) -> None:
    if memory.is_floating_point():
        memory.fill_(float("nan"))


def _method(function: Callable[..., T]) -> Callable[..., T]:
    """As an attribute of a class: called with the instance first."""
    return lambda *args: function(*args)


@contextmanager
def _busy(kind: str) -> Iterator[None]:
    """A thread that is in the way for a while."""
    done, began = threading.Event(), time.monotonic()

    def work() -> None:
        numbers = torch.ones(128, 128)
        while not done.is_set() and time.monotonic() < began + LONGEST_BURST:
            if kind == "lock":
                sum(range(1000))
            else:
                torch.mm(numbers, numbers)

    if not kind:
        yield
        return
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _stopped(stop: Stop) -> Iterator[None]:
    """This process is stopped for a moment, if it has not ended by then: the other process lets it go on."""
    pid = os.getpid()
    script = f"sleep {stop.after:.3f}; kill -STOP {pid}; sleep {stop.seconds:.3f}; kill -CONT {pid}"
    stopping = subprocess.Popen(["sh", "-c", script])
    try:
        yield
    finally:
        stopping.wait()
