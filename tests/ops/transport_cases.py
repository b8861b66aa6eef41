"""Transports for the time of a test, one of which stands in for memory of GPUs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.loopback import write_word
from tpkernels.comm import schedule
from tpkernels.comm.calls import calls_of
from tpkernels.comm.transports import c10d, processes, symmetric
from tpkernels.comm.transports import select as transports
from tpkernels.comm.transports.mailbox import MailboxExchange, Opening
from tpkernels.comm.transports.shared import Mapped, open_mapped
from tpkernels.dispatch import backends

T = TypeVar("T")


class ProcessHandle:
    """Stands for torch's `_SymmetricMemory` where the ranks are processes and the memory is the CPU's."""

    native_words = True

    def __init__(self, memories: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._memories, self._group = memories, group
        self.rank, self.world_size = group.rank(), len(memories)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memories[rank][: sizes[0]]

    def stream_write_value32(self, tensor: torch.Tensor, offset: int, val: int) -> None:
        write_word(tensor, offset, val)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        dist.barrier(self._group)


def open_stand_in(opening: Opening) -> MailboxExchange:
    """As `open_symmetric` does, but for the memory."""
    group = opening.group

    def build(shared: Mapping[int, Mapped]) -> symmetric.SymmetricExchange:
        handle = ProcessHandle([mapped.memory for mapped in shared.values()], group)
        own, streams = shared[group.rank()].memory, symmetric.streams_of(group, opening.device)
        return symmetric.SymmetricExchange(
            opening.name, opening.layout, handle, own, opening.timeout, streams=streams
        )

    exchange = open_mapped(opening, build)
    exchange.barrier(0)
    return exchange


@contextmanager
def using(transport: str, backend: str = "torch") -> Iterator[None]:
    """Until the end, transfers go as said.

    transport: one that users may wish for; "chunks": c10d, which sends few rows in chunks, too; "stand-in"
        or "rounds": symmetric, or that in two rounds, in memory of the CPU; " apart" behind it puts ranks on
        two machines in turn
    """
    transport, _, apart = transport.partition(" ")
    stands_for = {"stand-in": "symmetric", "rounds": transports.IN_ROUNDS}.get(transport, "")
    standing_in = {"symmetric": open_stand_in} if stands_for else {}
    changes = [patch.object(c10d, "collective_rounds", two_if_hidden)] if transport == "rounds" else []
    if transport == "chunks":
        transport, changes = "c10d", [patch.object(schedule, "LEAST_BYTES", 64)]
    place = f"host{dist.get_rank() % 2}" if apart else "one"
    with (
        patch.object(processes, "machine", lambda: place),
        patch.object(transports, "requested_transport", stands_for or transport),
        patch.object(backends, "backend", backend),
        patch.dict(transports.openers, standing_in),
        ExitStack() as entered,
    ):
        for change in changes:
            entered.enter_context(change)
        try:
            yield
        finally:
            # whose ranks agree anew, as their tests know nothing of this
            transports._forget(id(dist.group.WORLD))
            calls_of(dist.group.WORLD).kinds.clear()


def two_if_hidden(rows: int, features: int, *_: object) -> int:
    """Two rounds of a transfer that a product hides, however small it is."""
    return 2 if features else 1


def under(transport: str, backend: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function of other tests with this transport."""
    with using(transport, backend):
        return function(*args)


def open_exchanges() -> list[MailboxExchange]:
    return list(transports._of_group[id(dist.group.WORLD)]._open.values())


def pushers() -> int:
    return sum(thread.name.startswith("push of") for thread in threading.enumerate())


def be_impatient() -> None:
    """From now on only: ranks on a busy machine may come far apart to the call that opens an exchange."""
    for exchange in open_exchanges():
        exchange.timeout = 1.0


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """What a logger says until the end."""
    logger, lines = logging.getLogger(name), Lines()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines.said
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
        logger.propagate = propagate
