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
from tpkernels.comm.transports import host
from tpkernels.comm.transports.base import Delivery
from tpkernels.comm.transports.host import HostDelivery, HostExchange
from tpkernels.comm.transports.rows import HostWaits, sum_of_slots


def total_by_arrival(self: HostWaits, delivery: Delivery, bias: Tensor | None) -> Tensor:
    """This rank's own slot first, then the others as they come."""
    plan = delivery.plan
    rows = plan.rows // plan.ranks
    arrived = [plan.rank]

    def wait_for(source: int) -> None:
        delivery.await_rows(slice(source * rows, (source + 1) * rows))
        arrived.append(source)

    others = [source for source in range(plan.ranks) if source != plan.rank]
    threads = [threading.Thread(target=wait_for, args=(source,)) for source in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum_of_slots(delivery.slots[arrived], bias)


@contextmanager
def order_of_arrival() -> Iterator[None]:
    with patch.object(HostWaits, "total", total_by_arrival):
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
