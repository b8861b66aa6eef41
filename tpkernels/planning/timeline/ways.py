"""How a rank moves rows and multiplies them: what `Layout.gather` and `sum_of_products` enqueue on GPUs.

Operators (`operators.py`) are written with a `WayModel`. A way plans by the functions of `comm.schedule` that
the transports plan with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tpkernels.comm.schedule import (
    Plan,
    Round,
    collective_gather_plan,
    collective_reduce_plan,
    collective_rounds,
    swaps_full_sums,
)
from tpkernels.planning.timeline.node import Node
from tpkernels.planning.timeline.recording import KERNEL, NCCL, PRODUCT, READY, TRANSFER, Rank
from tpkernels.planning.timeline.simulation import TaskKey

ELEMENT = 2  # bytes, of bfloat16


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """One product of some rows."""

    name: str
    cols: int
    depth: int
    kernel: str = "linear"


@dataclass(slots=True)
class Moving:
    """Rows in flight."""

    name: str
    rows: int
    cols: int
    plan: Plan | None = None  # None: a rank alone
    arrivals: dict[int, list[TaskKey]] = field(default_factory=dict)  # by round
    then: Moving | None = None  # an all-reduce gathers what it has summed

    def all(self) -> list[TaskKey]:
        return [key for keys in self.arrivals.values() for key in keys]


class WayModel(ABC):
    """One rank's way to move rows."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def begin(self) -> None:
        """A call of an operator."""

    @abstractmethod
    def gather(self, name: str, rows: int, cols: int, features: int = 0) -> Moving:
        """All ranks' rows. features: width of the product that takes them as they arrive; 0: none does"""

    @abstractmethod
    def rowwise(self, moving: Moving, product: ProductSizes) -> None:
        """The product of all rows, as they arrive."""

    @abstractmethod
    def reduce(
        self, name: str, rows: int, product: ProductSizes, *, hidden: bool = False, to_all: bool = False
    ) -> Moving:
        """Sums over ranks of the product's rows.

        hidden: another product is computed before they are awaited
        """

    @abstractmethod
    def wait(self, moving: Moving) -> None:
        """For all rows."""

    @abstractmethod
    def product(self, rows: int, product: ProductSizes) -> None:
        """One that needs no other rank."""

    @abstractmethod
    def streamed(self, name: str, traffic: float) -> None:
        """A kernel without products, which reads and writes so many bytes."""

    def gradients(self, moving: Moving, dgrad: ProductSizes, wgrad: ProductSizes, weight_rows: int) -> None:
        """Both products with rows that arrive; wgrad: of which all rows are the depth."""
        self.rowwise(moving, dgrad)
        self.wait(moving)
        self.product(weight_rows, wgrad)

    @property
    def alone(self) -> bool:
        return self.rank.ranks == 1


class GpuWay(WayModel):
    """On GPUs of one machine: the host launches, streams run."""

    label: str

    def __init__(self, rank: Rank, node: Node) -> None:
        super().__init__(rank)
        self.node = node

    def begin(self) -> None:
        self.rank.host("operator", self.node.host.call)

    def product(self, rows: int, product: ProductSizes) -> None:
        self._multiply(product.name, rows, product)

    def streamed(self, name: str, traffic: float) -> None:
        launched = self.rank.host(name, self.node.host.kernel)
        self.rank.compute(name, self.node.times.streamed(traffic), launched, kind=KERNEL)

    def _keep(self, name: str, rows: int, cols: int) -> None:
        """A rank's own rows are copied beside those that arrive."""
        launched = self.rank.host(f"own rows of {name}", self.node.host.copy)
        traffic = 2.0 * rows / self.rank.ranks * cols * ELEMENT
        self.rank.compute(f"own rows of {name}", self.node.times.streamed(traffic), launched, kind=KERNEL)

    def _multiply(self, name: str, rows: int, product: ProductSizes) -> TaskKey:
        """Beside a collective it leaves that its processors, and takes as many more waves."""
        rank, all_processors = self.rank, self.node.gpu.processors
        launched = rank.host(name, self._kernel_cost)
        left_free = self.node.nccl.channels if rank.in_flight else 0
        seconds = self.node.times.product(product.kernel, rows, product.cols, product.depth, left_free)
        uses = {rank.processors: 1 - left_free / all_processors}
        return rank.compute(name, seconds, launched, kind=PRODUCT, uses=uses)

    @property
    def _kernel_cost(self) -> float:
        """Microseconds of host."""
        return self.node.host.kernel

    def _collective(self, name: str, sent: float, cost: float) -> TaskKey:
        """All ranks begin it together, behind what their compute streams have so far."""
        rank, nccl = self.rank, self.node.nccl
        launched, number = rank.host(name, cost), rank.next_transfer()
        rank.add(NCCL, name, 0.0, [launched, *rank.so_far()], kind=READY, key=rank.key("ready", number))
        all_ready = [(peer, rank.call, "ready", number) for peer in range(rank.ranks)]
        seconds = nccl.seconds(sent, self.node.gpu.nvlink, rank.ranks)
        occupied = {rank.processors: nccl.channels / self.node.gpu.processors}
        key = rank.add(NCCL, name, seconds, all_ready, kind=TRANSFER, uses={**occupied, **rank.sends()})
        rank.in_flight.add(key)
        return key


def bytes_sent(round: Round, cols: int) -> float:
    return float(sum(swap.sent.stop - swap.sent.start for swap in round.swaps) * cols * ELEMENT)


class C10d(GpuWay):
    """Collectives in rounds: `Collectives` of `comm/transports/c10d.py`."""

    label = "c10d"

    def gather(self, name: str, rows: int, cols: int, features: int = 0) -> Moving:
        if self.alone:
            return Moving(name, rows, cols)
        rank = self.rank
        plan = collective_gather_plan(rows, rank.ranks, rank.number, self._rounds(rows, features))
        moving = Moving(name, rows, cols, plan)
        self._move(moving)
        if len(plan.rounds) > 1:  # a lone all-gather brings a rank's own rows, too
            self._keep(name, rows, cols)
        return moving

    def rowwise(self, moving: Moving, product: ProductSizes) -> None:
        if moving.plan is None:
            self._multiply(product.name, moving.rows, product)
            return
        for number, round in enumerate(moving.plan.rounds):
            self.rank.wait(moving.arrivals.get(number, []))
            self._multiply(_numbered(product.name, number, moving.plan), _count(round), product)

    def reduce(
        self, name: str, rows: int, product: ProductSizes, *, hidden: bool = False, to_all: bool = False
    ) -> Moving:
        if self.alone:
            self._multiply(product.name, rows, product)
            return Moving(name, rows, product.cols)
        rank, cols = self.rank, product.cols
        rounds = self._rounds(rows, 0 if hidden else cols)
        if to_all and rounds == 1 and swaps_full_sums(rows * cols * ELEMENT, rank.ranks):
            self._multiply(product.name, rows, product)
            return self.gather(name, rank.ranks * rows, cols)
        plan = collective_reduce_plan(rows, rank.ranks, rank.number, rounds)
        moving = Moving(name, rows, cols, plan)
        for number, round in enumerate(plan.rounds):
            self._multiply(_numbered(product.name, number, plan), _count(round), product)
            self._move(moving, number)
        if not plan.rounds[-1].swaps:
            self._keep(name, rows, cols)
        if to_all:
            moving.then = Moving(name, rows, cols)
        return moving

    def wait(self, moving: Moving) -> None:
        if moving.plan is None:
            return
        self.rank.wait(moving.all())
        if moving.plan.reduces or moving.plan.rows > moving.rows:
            self._sum(moving)
        if moving.then is not None:
            self.wait(self.gather(f"sums of {moving.name}", moving.rows, moving.cols))

    def _sum(self, moving: Moving) -> None:
        """All slots are read, and their sum is written."""
        ranks = self.rank.ranks
        self.streamed(f"sum of {moving.name}", (ranks + 1) * moving.rows / ranks * moving.cols * ELEMENT)

    def _move(self, moving: Moving, only: int | None = None) -> None:
        assert moving.plan is not None
        for number, round in enumerate(moving.plan.rounds):
            if round.swaps and only in (None, number):
                name = _numbered(moving.name, number, moving.plan)
                sent = bytes_sent(round, moving.cols)
                moving.arrivals[number] = [self._collective(name, sent, self.node.host.collective)]

    def _rounds(self, rows: int, features: int) -> int:
        return collective_rounds(rows, features, self.rank.ranks, self.node.gpu.processors)


class Naive(C10d):
    """`F.linear` behind a blocking all-gather, or before a blocking reduce-scatter that NCCL sums."""

    label = "naive"

    def begin(self) -> None:
        """No operator of ours."""

    def gather(self, name: str, rows: int, cols: int, features: int = 0) -> Moving:
        moving = super().gather(name, rows, cols, 0)
        self.rank.wait(moving.all())
        return moving

    def reduce(
        self, name: str, rows: int, product: ProductSizes, *, hidden: bool = False, to_all: bool = False
    ) -> Moving:
        self._multiply(product.name, rows, product)
        if not self.alone:
            ranks = self.rank.ranks
            once = rows * product.cols * ELEMENT * (ranks - 1) / ranks
            key = self._collective(name, once * (1 + to_all), self.node.host.naive_collective)
            self.rank.wait([key])
        return Moving(name, rows, product.cols)

    def _move(self, moving: Moving, only: int | None = None) -> None:
        assert moving.plan is not None
        sent = sum(bytes_sent(round, moving.cols) for round in moving.plan.rounds)
        moving.arrivals[0] = [self._collective(moving.name, sent, self.node.host.naive_collective)]

    @property
    def _kernel_cost(self) -> float:
        return self.node.host.naive_kernel


def _count(round: Round) -> int:
    return len(range(round.rows.start, round.rows.stop))


def _numbered(name: str, number: int, plan: Plan) -> str:
    return name if len(plan.rounds) == 1 else f"{name} {number + 1}"
