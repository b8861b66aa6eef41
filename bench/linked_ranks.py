"""Ranks on CPUs as tasks of a simulation: what operators do, message by message, on a link of known speed.

One thread a rank posts messages and multiplies; gloo's thread moves them. Between two ranks there is one
socket each way, whose bytes go one after the other. gloo sends a message once its receiver has asked for it
over its own socket. Such a request queues behind the receiver's own messages.

The host code of each rank runs once, with a group that notes what it sends and receives, and products that
are noted instead of computed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import paused_products
from bench.cases.linear_overlap import IN, OUT_SHARD, TOKENS
from bench.streams.times import (
    HOST,
    KERNEL,
    NOTHING,
    PRODUCT,
    TRANSFER,
    Queue,
    Ran,
    Resource,
    TaskKey,
    TimelineTask,
    run,
)
from tpkernels.comm.transports import rows
from tpkernels.comm.transports.c10d import C10D
from tpkernels.dispatch import backends
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel import parallel

CORES: Resource = ("cores",)
RANKS = 2


@dataclass(frozen=True, slots=True)
class MeasuredRanks:
    """Times that ranks of one machine were measured to take."""

    product: Callable[[str, int], float]  # seconds of a kernel with so many rows, or so many deep for wgrad
    sum: float  # seconds of the sum of all slots
    zeros: float  # seconds of zeros that weight gradients of batches of rows are added to
    bytes_a_second: float  # of each direction of a link
    notice: float  # seconds until a rank knows that its peer waits for a message
    stolen: float  # the part of a core that a rank loses while messages go both ways
    skew: float  # how much longer the second rank's products take, as a part of them
    cores: int = 2


def ran(case: str, machine: MeasuredRanks, *, overlap: bool) -> list[Ran]:
    """One call on both ranks. case: as "column forward" """
    tasks: list[TimelineTask] = []
    for rank in range(RANKS):
        _Rank(rank, machine, tasks).call(case, overlap)
    sockets = [("to", rank, peer) for rank in range(RANKS) for peer in range(RANKS)]
    return list(run(tasks, sockets).values())


class _Rank:
    """Notes what one rank does."""

    def __init__(self, rank: int, machine: MeasuredRanks, tasks: list[TimelineTask]) -> None:
        self.rank, self.machine, self._tasks = rank, machine, tasks
        self._count: Counter[Hashable] = Counter()
        self.noting = False

    def call(self, case: str, overlap: bool) -> None:
        kind, direction = case.split()
        narrow, wide = torch.empty(TOKENS // RANKS, IN), torch.empty(TOKENS, OUT_SHARD)
        op: Callable[..., Tensor] = column_linear if kind == "column" else row_linear
        x, dy = (narrow, wide) if kind == "column" else (wide, narrow)
        leaves = [x.requires_grad_(), torch.empty(dy.shape[1], x.shape[1]).requires_grad_()]
        with self._standing_in() as group:
            self.noting = direction == "forward"
            y = op(*leaves, None, group, sequence_parallel=True, overlap=overlap)
            self.noting = direction == "backward"
            torch.autograd.grad(y, leaves, dy)

    @contextmanager
    def _standing_in(self) -> Iterator[dist.ProcessGroup]:
        def make(store: object, rank: int, size: int, timeout: timedelta) -> _Sockets:
            return _Sockets(self, rank, size)

        if not hasattr(dist.Backend, "SOCKETS"):
            dist.Backend.register_backend("sockets", lambda *given: _made[-1](*given), devices=["cpu"])
        _made[:] = [make]
        with patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"):  # torch 2.15 records no group without backends
            dist.init_process_group("sockets", store=dist.HashStore(), rank=self.rank, world_size=RANKS)
        new_zeros = Tensor.new_zeros

        def zeros(like: Tensor, *given: Any, **named: Any) -> Tensor:
            self.computes("zeros", self.machine.zeros)
            return new_zeros(like, *given, **named)

        def total(slots: Tensor, bias: object) -> Tensor:
            self.computes("sum", self.machine.sum)
            return slots[0]

        try:
            with (
                paused_products.paused_products(),
                patch.object(paused_products, "pause", self.multiplies),
                patch.object(Tensor, "new_zeros", zeros),
                patch.object(rows, "sum_of_slots", total),
                patch.object(parallel, "exchange_for", lambda *_, **__: C10D),
                patch.object(parallel, "exchanges_for_sum", lambda *_, **__: (C10D, C10D)),
                patch.object(backends, "backend", "torch"),
            ):
                group = dist.group.WORLD
                assert group is not None, "it has just been made"
                yield group
        finally:
            dist.destroy_process_group()

    def number(self, *what: Hashable) -> int:
        self._count[what] += 1
        return self._count[what]

    def add(
        self, queue: Queue, name: str, seconds: float, after: Sequence[TaskKey], kind: str, used: float,
        key: TaskKey | None = None,
    ) -> TaskKey:  # fmt: skip
        key = key or (self.rank, self.number("task"))
        uses = {CORES: used / self.machine.cores} if used else {}
        if self.noting:
            self._tasks.append(TimelineTask(key, queue, seconds, tuple(after), uses, name, kind))
        return key

    def does(self, name: str, after: Sequence[TaskKey] = ()) -> TaskKey:
        """What takes the thread no time, once it may."""
        return self.add((HOST, self.rank), name, 0.0, after, NOTHING, 0.0)

    def computes(self, name: str, seconds: float, kind: str = KERNEL) -> None:
        self.add((HOST, self.rank), name, seconds, (), kind, 1.0)

    def multiplies(self, rows: int, kernel: str) -> None:
        slower = 1 + self.machine.skew * self.rank
        if self.noting:
            self.computes(kernel, slower * self.machine.product(kernel, rows), PRODUCT)


class _Message:
    """On its way; who waits for it goes on when it has moved."""

    def __init__(self, rank: _Rank, moved: TaskKey) -> None:
        self._rank, self._moved = rank, moved

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._rank.does("wait", [self._moved])
        return True

    def is_completed(self) -> bool:
        return True


class _Backend:
    supports_coalescing = False

    def name(self) -> str:
        return "gloo"


class _Sockets(dist.ProcessGroup):
    """Sends and receives of one rank. A receiver gets messages of one tag in the order of their sends."""

    def __init__(self, rank: _Rank, number: int, ranks: int) -> None:
        super().__init__(number, ranks)  # type: ignore[call-arg]  # as torch's own test groups do
        self._rank = rank

    def getBackendName(self) -> str:
        return "sockets"

    @property
    def group_name(self) -> Any:
        return "sockets"

    def _get_backend(self, device: torch.device) -> Any:
        return _Backend()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        rank = self._rank
        message = source, rank.rank, tag, rank.number("received", source, tag)
        line, notice = ("to", rank.rank, source), rank.machine.notice
        rank.add(line, "wanted", notice, [rank.does("post")], NOTHING, 0.0, ("wanted", *message))
        return _Message(rank, ("moved", *message))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        rank, machine = self._rank, self._rank.machine
        message = rank.rank, to, tag, rank.number("sent", to, tag)
        seconds = tensors[0].nbytes / machine.bytes_a_second
        after = [rank.does("post"), ("wanted", *message)]
        line, moved = ("to", rank.rank, to), ("moved", *message)
        return _Message(rank, rank.add(line, "rows", seconds, after, TRANSFER, machine.stolen, moved))


_made: list[Callable[..., _Sockets]] = []
