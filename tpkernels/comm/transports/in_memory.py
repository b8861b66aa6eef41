"""The transport of an exchange in memory that ranks share.

It may cut calls into rounds, as collectives are cut: each is a product by itself, of rows that are awaited
before it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import (
    collective_gather_plan,
    collective_reduce_plan,
    count_of,
    gather_plan,
    reduce_plan,
)
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange
from tpkernels.comm.transports.rows import Gather, Kernels, Reduce, Terms, add_up


class Mailboxes:
    """The transport of an exchange.

    Rows land where they land in any call of the exchange, so that calls of any number of rounds, and of
    kernels that wait, may follow each other.
    """

    def __init__(
        self, exchange: MailboxExchange, kernels: Kernels | None, rounds: int = 0, *, pushes: bool = False
    ) -> None:
        """kernels: wait for rows, and add them; None: the host does

        rounds: of products, each of rows that are awaited before it; 0: chunks, or one kernel that waits
        pushes: a kernel computes terms and stores them where they belong
        """
        self.exchange, self.rounds, self._kernels, self.pushes = exchange, rounds, kernels, pushes
        self.note = f" in {rounds} rounds of products" * bool(rounds) + " by a kernel" * pushes
        memory = "shared memory" if exchange.host_waits else "symmetric memory"
        chunks = (
            "a kernel stores"
            if pushes
            else "a kernel waits"
            if kernels
            else count_of(exchange.splits, "chunk")
        )
        self.way = f"{memory}, {count_of(rounds, 'round') if rounds else chunks}"
        if kernels is not None and exchange.flag_kernels is not kernels:
            exchange.count_by(kernels)

    def gather(self, call: Call, shard: Tensor, rows: int, *, keeps: bool, at_once: bool) -> Gather:
        exchange, kernels = self.exchange, self._kernels
        if self.rounds:
            plan = collective_gather_plan(rows, exchange.ranks, exchange.rank, self.rounds)
        else:
            chunks = 1 if at_once else exchange.splits
            plan = gather_plan(rows, exchange.ranks, exchange.rank, chunks, False)
        delivery = exchange.begin(call, plan, shard.shape[1], shard)
        delivery.move(plan.together, shard, plan.own.start)
        delivery.keep(shard)
        if kernels is None:
            arriving = [(round.rows, partial(delivery.await_rows, round.rows)) for round in plan.rounds]
            return Gather(delivery.memory, arriving, delivery.end, lasts=False, at_once=at_once, keeps=keeps)
        copy = partial(kernels.copy_of, delivery)
        if not self.rounds or at_once:
            kernel = None if at_once else delivery
            return Gather(
                delivery.memory, (), delivery.end, lasts=False, keeps=keeps, delivery=kernel, copy=copy
            )
        waits = [partial(kernels.wait_for, delivery, round.rows) for round in plan.rounds[1:]]
        own_first = (
            [None, *waits]
            if plan.rounds[0].rows == plan.own
            else [partial(kernels.wait_for, delivery, plan.rounds[0].rows), *waits]
        )
        arriving_rounds = [(round.rows, wait) for round, wait in zip(plan.rounds, own_first, strict=True)]
        return Gather(delivery.memory, arriving_rounds, delivery.end, lasts=False, keeps=keeps, copy=copy)

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        exchange, kernels = self.exchange, self._kernels
        if self.rounds:
            plan = collective_reduce_plan(terms.rows, exchange.ranks, exchange.rank, self.rounds)
        else:
            splits = 1 if at_once else exchange.splits
            plan = reduce_plan(terms.rows, exchange.ranks, exchange.rank, splits, False)
        delivery = exchange.begin(call, plan, terms.cols, terms.like)
        if self.pushes:
            assert kernels is not None, "a kernel pushes"
            delivery.before_kernels_push()
            kernels.push(delivery, terms)
        else:
            # a kernel sums all at once: small products waste a GPU
            whole = at_once or (kernels is not None and not self.rounds)
            computed = terms.at_once().__getitem__ if whole else terms.compute
            for round in plan.rounds:
                chunk, first = computed(round.rows).contiguous(), round.rows.start
                delivery.move(round, chunk, first)
            delivery.keep(chunk[plan.own.start - first : plan.own.stop - first])  # the last round has them
        return Reduce(terms, (), partial(self._sum, delivery, bias, terms), delivery.end)

    def _sum(self, delivery: MailboxDelivery, bias: Tensor | None, terms: Terms) -> Tensor:
        if self._kernels is not None:
            slots = delivery.slots
            return self._kernels.sum_of(slots, bias, delivery, tree=terms.tree, after=terms.after)
        delivery.await_rows(slice(0, delivery.plan.rows))
        return add_up(delivery.slots, bias, tree=terms.tree)
