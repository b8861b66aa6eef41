"""Ways to move rows: our operators' transports, and two other ways by patches of our operators.

naive         `F.linear` after a blocking all-gather, or before a blocking reduce-scatter that NCCL sums
decomposed    a product for each rank's rows, once copy engines have brought them; a kernel adds up sums
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from tpkernels.comm import carveout
from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Plan, Round, gather_plan, pushing_gather_plan, reduce_plan
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import c10d_for
from tpkernels.comm.transports.rows import Waits
from tpkernels.comm.transports.symmetric import SymmetricDelivery, SymmetricExchange
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_SUMS, waits_for
from tpkernels.streams.device import current_device
from tpkernels.streams.peers import NcclGroup
from tpkernels.streams.program import Awaited, Step

TRANSPORTS = {"naive": "c10d", "c10d": "c10d", "symmetric": "symmetric", "decomposed": "symmetric"}


class Decomposed(SymmetricExchange):
    """Pushes rows as our exchange, with one round for each rank's rows."""

    def plan_gather(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        _, *others = gather_plan(rows, ranks, rank, 1, tapered=False).rounds
        pushing = pushing_gather_plan(rows, ranks, rank, self.splits)
        return replace(pushing, rounds=(pushing.rounds[0], *(Round(theirs.rows, ()) for theirs in others)))

    def plan_reduce(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        return reduce_plan(rows, ranks, rank, 1, tapered=False)

    def _delivery(self, epoch: int, needs_barrier: bool, plan: Plan, call: Call | None) -> SymmetricDelivery:
        made = super()._delivery(epoch, needs_barrier, plan, call)
        return _Delivery(self, epoch, needs_barrier, plan, made._word, call, made._current)


class _Delivery(SymmetricDelivery):
    lasts = True  # rows are not copied

    def keep(self, rows: Tensor) -> None:
        """Keep nothing for a sum: the product writes the rank's own rows to their place."""
        if not self.plan.reduces:
            super().keep(rows)

    def await_rows(self, rows: slice) -> None:
        """Make the current stream wait for rows."""
        first, word = self.flags.data_ptr(), self.awaited.data_ptr()
        awaits = tuple(Awaited(first + 4 * chunk, word) for chunk in self.exchange.chunk_numbers(rows))
        current_device().enqueue("rows are awaited", [[Step(awaits=awaits)]], on_processors=False)


@contextmanager
def going(way: str) -> Iterator[None]:
    """Make operators go this way inside the block, and name transfers by the data that they move."""
    begin_call = parallel.begin_call

    def begin(op: str, what: str, *given: Any) -> Call:
        current_device().moves = what.partition(" in ")[0]  # without the number of rounds
        return begin_call(op, what, *given)

    with ExitStack() as entered:
        entered.enter_context(patch.object(parallel, "begin_call", begin))
        for change in {"naive": _naive, "decomposed": _decomposed}.get(way, list)():
            entered.enter_context(change)
        yield


def _naive() -> list[Any]:
    start = NcclGroup._start

    def blocking(group: NcclGroup, *given: Any, **named: Any) -> Any:
        if (work := start(group, *given, **named)) is not None:
            work.wait()
        return work

    return [
        patch.object(NcclGroup, "_start", blocking),
        patch.object(parallel, "backend_sums", True),
        patch.object(carveout, "_add", lambda _: None),  # nothing is in flight
    ]


def _decomposed() -> list[Any]:
    found = parallel.exchange_for

    def exchange_for(
        op: str, purpose: str, like: Tensor, rows: int, cols: int, group: Any, features: int, overlap: bool,
        **options: Any,
    ) -> Exchange:  # fmt: skip
        """Use collectives for rows that no product takes as they arrive, and for sums for all ranks."""
        if not features or options.get("to_all"):
            return c10d_for(like, rows, features, group.size(), overlap)
        return found(op, purpose, like, rows, cols, group, features, overlap, **options)

    def waits(op: str, exchange: Exchange, like: Tensor, **options: Any) -> Waits:
        return KERNEL_SUMS if isinstance(exchange, Decomposed) else waits_for(op, exchange, like, **options)

    return [
        patch.object(parallel, "exchange_for", exchange_for),
        patch.object(parallel, "waits_for", waits),
    ]
