"""GPUs that write into each other's memory: copy engines and one product that waits, or one that pushes.

`Symmetric` is `comm/transports/symmetric.py` with the kernels of `flag_waits.py`. `Decomposed` has the
shape of what others do: a product for each rank's rows, as these arrive, each launched by the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpkernels.comm.schedule import gather_plan, pushed_chunks, pushing_gather_plan, reduce_plan
from tpkernels.planning.timeline.node import Node
from tpkernels.planning.timeline.recording import COPIES, KERNEL, TRANSFER, Rank
from tpkernels.planning.timeline.simulation import TaskKey
from tpkernels.planning.timeline.ways import ELEMENT, C10d, GpuWay, Moving, ProductSizes


class Symmetric(GpuWay):
    """One kernel a product, which waits for flags, or stores to other ranks and raises them."""

    label = "symmetric"

    def gather(self, name: str, rows: int, cols: int, features: int = 0) -> Moving:
        if self.alone:
            return Moving(name, rows, cols)
        rank, number = self.rank, self.rank.next_transfer()
        plan = pushing_gather_plan(rows, rank.ranks, rank.number, self._splits(rows, cols))
        moving = Moving(name, rows, cols, plan)
        so_far = rank.so_far()
        for swap in plan.swaps:
            self._copy(name, swap.to, swap.sent, cols, number, so_far)
        self._keep(name, rows, cols)
        for at, round in enumerate(plan.rounds):
            source = self._owner(plan.rows, round.rows.start)
            if source != rank.number:
                moving.arrivals[at] = [(source, rank.call, "pushed", number, rank.number, round.rows.start)]
        return moving

    def rowwise(self, moving: Moving, product: ProductSizes) -> None:
        """One launch; its tiles begin in the order in which rows arrive."""
        times, rank = self.node.times, self.rank
        launched = rank.host(product.name, self.node.host.kernel)
        total = times.product(product.kernel, moving.rows, product.cols, product.depth)
        if moving.plan is None:
            rank.compute(product.name, total, launched)
            return
        total *= self.node.waiting
        for at, round in enumerate(moving.plan.rounds):
            share = (round.rows.stop - round.rows.start) / moving.rows
            rank.compute(f"{product.name} {at + 1}", share * total, launched, moving.arrivals.get(at, []))

    def reduce(
        self, name: str, rows: int, product: ProductSizes, *, hidden: bool = False, to_all: bool = False
    ) -> Moving:
        """One product whose tiles go straight into the slots of their owners, others' rows first."""
        rank, times, cols = self.rank, self.node.times, product.cols
        launched = rank.host(product.name, self.node.host.kernel)
        total = times.product(product.kernel, rows, cols, product.depth)
        if self.alone:
            rank.compute(product.name, total, launched)
            return Moving(name, rows, cols)
        number = rank.next_transfer()
        plan = reduce_plan(rows, rank.ranks, rank.number, 1, tapered=False)
        moving = Moving(name, rows, cols, plan)
        reach = self.node.store_share * self.node.gpu.nvlink
        for at, round in enumerate(plan.rounds):
            count = round.rows.stop - round.rows.start
            seconds = count / rows * total * self.node.waiting
            for swap in round.swaps:
                stored = count * cols * ELEMENT / reach / seconds  # of the link, while it multiplies
                uses = {resource: stored for resource in rank.sends(swap.to)}
                key = rank.key("stored", number, swap.to)
                rank.compute(f"{product.name} {at + 1}", seconds, launched, uses=uses, key=key)
                moving.arrivals.setdefault(at, []).append(
                    (swap.source, rank.call, "stored", number, rank.number)
                )
            if not round.swaps:
                rank.compute(f"{product.name} {at + 1}", seconds, launched)
        if to_all:
            moving.then = Moving(name, rows, cols)
        return moving

    def wait(self, moving: Moving) -> None:
        if moving.plan is None:
            return
        ranks = self.rank.ranks
        self.rank.wait(moving.all())
        if moving.plan.reduces:
            self.streamed(f"sum of {moving.name}", (ranks + 1) * moving.rows / ranks * moving.cols * ELEMENT)
        else:
            self.streamed(f"copy of {moving.name}", 2.0 * moving.rows * moving.cols * ELEMENT)
        if moving.then is not None:
            self.wait(self.gather(f"sums of {moving.name}", moving.rows, moving.cols))

    def _copy(
        self, name: str, to: int, rows: slice, cols: int, number: int, after: Sequence[TaskKey]
    ) -> None:
        node, rank = self.node, self.rank
        launched = rank.host(f"{name} to {to}", node.host.copy)
        sent = (rows.stop - rows.start) * cols * ELEMENT
        seconds = sent / (node.copy_share * node.gpu.nvlink)
        copied = rank.add(
            COPIES, f"{name} to {to}", seconds, [launched, *after], kind=TRANSFER, uses=rank.sends(to)
        )
        key = rank.key("pushed", number, to, rows.start)
        rank.add(COPIES, "flag", node.copy_latency, [copied], kind=KERNEL, key=key)

    def _splits(self, rows: int, cols: int) -> int:
        shard = rows // self.rank.ranks
        return pushed_chunks(shard, shard * cols * ELEMENT, self.rank.ranks)

    def _owner(self, rows: int, row: int) -> int:
        return row * self.rank.ranks // rows


class Decomposed(C10d):
    """A product a rank, each when a copy engine has brought its rows; sums by a kernel at the end."""

    label = "decomposed"
    kernel_cost = 16.0  # microseconds of host: 8 chunks with their copies take 277 in all (kraken, PR 2)

    def __init__(self, rank: Rank, node: Node) -> None:
        super().__init__(rank, node)
        self._symmetric = Symmetric(rank, node)

    def gather(self, name: str, rows: int, cols: int, features: int = 0) -> Moving:
        if self.alone or not features:
            return super().gather(name, rows, cols, features)
        moving = self._symmetric.gather(name, rows, cols, features)
        moving.plan = gather_plan(rows, self.rank.ranks, self.rank.number, 1, tapered=False)
        moving.arrivals = {
            at: [key for key in moving.all() if self._start(key) in range(round.rows.start, round.rows.stop)]
            for at, round in enumerate(moving.plan.rounds)
        }
        return moving

    def reduce(
        self, name: str, rows: int, product: ProductSizes, *, hidden: bool = False, to_all: bool = False
    ) -> Moving:
        if self.alone or hidden or to_all:
            return super().reduce(name, rows, product, hidden=hidden, to_all=to_all)
        rank, number = self.rank, self.rank.next_transfer()
        plan = reduce_plan(rows, rank.ranks, rank.number, 1, tapered=False)
        moving = Moving(name, rows, product.cols, plan)
        for at, round in enumerate(plan.rounds):
            self._multiply(f"{product.name} {at + 1}", round.rows.stop - round.rows.start, product)
            for swap in round.swaps:
                self._symmetric._copy(name, swap.to, swap.sent, product.cols, number, rank.so_far())
                start = plan.own.start
                moving.arrivals.setdefault(at, []).append(
                    (swap.source, rank.call, "pushed", number, rank.number, start)
                )
        return moving

    @staticmethod
    def _start(key: TaskKey) -> int:
        start = key[-1]
        assert isinstance(start, int)
        return start

    @property
    def _kernel_cost(self) -> float:
        return min(self.kernel_cost, self.node.host.kernel)
