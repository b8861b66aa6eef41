"""Faults for ranks of `bench bits`, by name: above all a sum in the order of arrival."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

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


def sums_in_order_of_arrival() -> None:
    HostWaits.total = total_by_arrival  # type: ignore[method-assign]


def flags_come_before_their_rows() -> None:
    def put(self: HostExchange, peer: int, there: slice, rows: Tensor, delivery: HostDelivery) -> None:
        landing, chunks = self.landing(delivery.slot, peer), self.chunks_of_ours(there)
        landing.flags[chunks.start : chunks.stop].fill_(delivery.flag)
        host._copy(landing.rows_of(chunks), rows)

    HostExchange.put = put  # type: ignore[method-assign]


def a_rank_hangs() -> None:
    _second_row(lambda: time.sleep(3600))


def a_rank_dies() -> None:
    _second_row(lambda: os._exit(7))


def _second_row(fault: Callable[[], None]) -> None:
    """On rank 1, when it computes that program for the second time: under the first schedule."""
    sound, calls = PROGRAMS["row"], []

    def faulty(place: Place) -> Results:
        calls.append(place)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            fault()
        return sound(place)

    PROGRAMS["row"] = faulty
