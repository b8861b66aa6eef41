"""Faults for ranks of `bench bits`, by name: above all a sum in the order of arrival."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from bench.bits.programs import PROGRAMS, Place, Results
from tpkernels.comm.calls import Call
from tpkernels.comm.transports import c10d, host
from tpkernels.comm.transports.c10d import PointToPoint
from tpkernels.comm.transports.host import HostDelivery, HostExchange
from tpkernels.comm.transports.in_memory import Mailboxes
from tpkernels.comm.transports.mailbox import MailboxDelivery
from tpkernels.comm.transports.rows import Reduce, Terms, add_up

_reduce, _ARRIVED = PointToPoint.reduce, list[int]()  # the order of slots, for the sum that comes next


def sum_by_arrival(self: Mailboxes, delivery: MailboxDelivery, bias: Tensor | None, terms: Terms) -> Tensor:
    """This rank's own slot first, then the others as they come."""
    plan = delivery.plan
    rows = plan.rows // plan.ranks

    def wait_for(source: int) -> Callable[[], object]:
        return lambda: delivery.await_rows(slice(source * rows, (source + 1) * rows))

    others = [source for source in range(plan.ranks) if source != plan.rank]
    arrived = _in_order_of_arrival({source: wait_for(source) for source in others})
    return add_up(delivery.slots[[plan.rank, *arrived]], bias, tree=terms.tree)


def reduce_by_arrival(
    self: PointToPoint, call: Call, terms: Terms, bias: Tensor | None, **_: object
) -> Reduce:
    """In one chunk for each rank."""
    reducing = _reduce(self, call, terms, bias, at_once=True)
    confirm, *waits = reducing._arriving
    calls = call.calls

    def wait_for_all() -> None:
        _ARRIVED[:] = [calls.rank, *_in_order_of_arrival(dict(zip(calls.peers, waits, strict=True)))]

    reducing._arriving = [confirm, wait_for_all]
    return reducing


def add_as_arrived(slots: Tensor | list[Tensor], bias: Tensor | None, *, tree: bool = False) -> Tensor:
    if _ARRIVED and isinstance(slots, Tensor):
        slots = slots[_ARRIVED]
        _ARRIVED.clear()
    return add_up(slots, bias, tree=tree)


def _in_order_of_arrival(waits: dict[int, Callable[[], object]]) -> list[int]:
    arrived: list[int] = []

    def wait_for(source: int) -> None:
        waits[source]()
        arrived.append(source)

    threads = [threading.Thread(target=wait_for, args=(source,)) for source in waits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return arrived


@contextmanager
def order_of_arrival() -> Iterator[None]:
    with (
        patch.object(Mailboxes, "_sum", sum_by_arrival),
        patch.object(PointToPoint, "reduce", reduce_by_arrival),
        patch.object(c10d, "add_up", add_as_arrived),
    ):
        yield


@contextmanager
def flags_come_before_their_rows() -> Iterator[None]:
    def put(self: HostExchange, peer: int, there: slice, rows: Tensor, delivery: HostDelivery) -> None:
        landing, chunks = self.landing(delivery.slot, peer), self.chunks_of_ours(there)
        landing.flags[chunks.start : chunks.stop].fill_(delivery.flag)
        host._copy(landing.rows_of(chunks), rows)

    with patch.object(HostExchange, "put", put):
        yield


def a_rank_hangs() -> AbstractContextManager[None]:
    return _second_row(lambda: time.sleep(3600))


def a_rank_dies() -> AbstractContextManager[None]:
    return _second_row(lambda: os._exit(7))


@contextmanager
def _second_row(fault: Callable[[], None]) -> Iterator[None]:
    """On rank 1, when it computes that program for the second time: under the first schedule."""
    sound, calls = PROGRAMS["row"], []

    def faulty(place: Place) -> Results:
        calls.append(place)
        if len(calls) == 2 and dist.get_rank() == 1:
            fault()
        return sound(place)

    with patch.dict(PROGRAMS, row=faulty):
        yield
