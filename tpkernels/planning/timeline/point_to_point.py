"""Messages between processes on CPUs: `C10dExchange` of `comm/transports/c10d.py` over gloo.

One thread a rank posts messages and multiplies; gloo's thread moves them. Between two ranks there is one
socket each way, whose bytes go one after the other. gloo sends a message when its receiver has said, over
its own socket, that it waits for it; what it says queues behind what it sends. So a rank posts what it
receives before what it sends, else its peer may begin only when it has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpkernels.comm.schedule import Plan, Round, Swap, gather_plan, parts_of_shard, reduce_plan
from tpkernels.planning.timeline.recording import HOST, KERNEL, PRODUCT, READY, TRANSFER, Rank
from tpkernels.planning.timeline.simulation import Queue, Resource, TaskKey
from tpkernels.planning.timeline.ways import Moving, ProductSizes, WayModel

CORES: Resource = ("machine", "cores")


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
    element: int = 4  # bytes
    cores: int = 2


def sockets(ranks: int) -> list[Queue]:
    """The lines of a run."""
    return [(rank, ("to", peer)) for rank in range(ranks) for peer in range(ranks) if rank != peer]


class PointToPoint(WayModel):
    """A shard in chunks, each a message; without overlap one message, and all rows at once."""

    def __init__(self, rank: Rank, machine: MeasuredRanks, *, overlap: bool) -> None:
        super().__init__(rank)
        self.machine, self.overlap = machine, overlap

    def begin(self) -> None:
        """What a call costs beside is in what it posts."""

    def gather(self, name: str, rows: int, cols: int, features: int = 0) -> Moving:
        rank, shares = self.rank, self._chunks(rows, cols)
        moving = Moving(name, rows, cols, gather_plan(rows, rank.ranks, rank.number, shares))
        number = rank.next_transfer()
        for at in range(len(self._rounds(moving))):
            self._exchange(moving, at, number)
        return moving

    def rowwise(self, moving: Moving, product: ProductSizes) -> None:
        if not self.overlap:
            self._await(moving.all())
            self._multiply(product, moving.rows)
            return
        for at, round in enumerate(self._rounds(moving)):
            self._await(moving.arrivals.get(at, []))
            self._multiply(product, _count(round))
        self._await(moving.all())

    def gradients(self, moving: Moving, dgrad: ProductSizes, wgrad: ProductSizes, weight_rows: int) -> None:
        """With overlap dw is taken of a quarter of the rows or more, as in `row_linear`."""
        if not self.overlap:
            super().gradients(moving, dgrad, wgrad, weight_rows)
            return
        batch, upto = 0, moving.plan.own.start if moving.plan else 0
        self.rank.add(HOST, "zeros", self.machine.zeros, kind=KERNEL, uses=self._core)
        for at, round in enumerate(self._rounds(moving)):
            self._await(moving.arrivals.get(at, []))
            if round.rows.start != upto and batch:
                self._multiply(wgrad, batch)
                batch = 0
            batch, upto = batch + _count(round), round.rows.stop
            if batch >= moving.rows // 4:
                self._multiply(wgrad, batch)
                batch = 0
            self._multiply(dgrad, _count(round))
        self._await(moving.all())
        if batch:
            self._multiply(wgrad, batch)

    def reduce(
        self, name: str, rows: int, product: ProductSizes, *, hidden: bool = False, to_all: bool = False
    ) -> Moving:
        assert not to_all, "an all-reduce point to point is not modelled"
        rank, shares = self.rank, self._chunks(rows, product.cols)
        moving = Moving(name, rows, product.cols, reduce_plan(rows, rank.ranks, rank.number, shares))
        number = rank.next_transfer()
        if not self.overlap:
            self._multiply(product, rows)
        for at, round in enumerate(self._rounds(moving)):
            if self.overlap:
                self._multiply(product, _count(round))
            self._exchange(moving, at, number)
        if hidden and not self.overlap:
            self.wait(moving)
            moving.plan = None  # awaited
        return moving

    def wait(self, moving: Moving) -> None:
        if moving.plan is not None:
            self._await(moving.all())
            if moving.plan.reduces:
                self.rank.add(HOST, f"sum of {moving.name}", self.machine.sum, kind=KERNEL, uses=self._core)

    def product(self, rows: int, product: ProductSizes) -> None:
        self._multiply(product, product.depth if product.kernel == "wgrad" else rows)

    def streamed(self, name: str, traffic: float) -> None:
        raise NotImplementedError("only single products were measured on CPUs")

    def _multiply(self, product: ProductSizes, rows: int) -> None:
        slower = 1 + self.machine.skew * self.rank.number
        seconds = slower * self.machine.product(product.kernel, rows)
        self.rank.add(HOST, product.name, seconds, kind=PRODUCT, uses=self._core)

    def _await(self, keys: list[TaskKey]) -> None:
        self.rank.add(HOST, "wait", 0.0, keys, kind=READY)

    def _exchange(self, moving: Moving, at: int, number: int) -> None:
        """Post a receive and a send, in this order, for each swap of a round."""
        for swap in self._rounds(moving)[at].swaps:
            posted = self.rank.add(HOST, "post", 0.0, kind=READY)
            moving.arrivals.setdefault(at, []).extend(self._messages(moving, swap, number, posted))

    def _messages(self, moving: Moving, swap: Swap, number: int, posted: TaskKey) -> list[TaskKey]:
        """What this rank awaits before it reads: the message of its peer; and that its own has gone."""
        rank, machine = self.rank, self.machine
        here, there = swap.received.start, swap.lands.start
        size = (swap.sent.stop - swap.sent.start) * moving.cols * machine.element
        wants, back = rank.key("wanted", number, swap.source, here), ("to", swap.source)
        rank.add(back, "wanted", machine.notice, [posted], kind=READY, key=wants)
        wanted = (swap.to, rank.call, "wanted", number, rank.number, there)
        moved, socket = rank.key("moved", number, swap.to, there), ("to", swap.to)
        seconds, uses = size / machine.bytes_a_second, {CORES: machine.stolen / machine.cores}
        rank.add(socket, moving.name, seconds, [posted, wanted], kind=TRANSFER, uses=uses, key=moved)
        return [(swap.source, rank.call, "moved", number, rank.number, here), moved]

    def _rounds(self, moving: Moving) -> tuple[Round, ...]:
        plan: Plan | None = moving.plan
        assert plan is not None, "there is more than one rank"
        return plan.rounds

    def _chunks(self, rows: int, cols: int) -> int:
        shard_bytes = -(-rows // self.rank.ranks) * cols * self.machine.element
        return parts_of_shard(shard_bytes) if self.overlap else 1

    @property
    def _core(self) -> dict[Resource, float]:
        return {CORES: 1 / self.machine.cores}


def _count(round: Round) -> int:
    return len(range(round.rows.start, round.rows.stop))
