"""Assertions for a user's own tests.

def test_the_gather_of_my_layer_is_hidden():
    with assert_overlapped("column_linear"):
        layer(x)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tpkernels.explanation import CallsRead
from tpkernels.journal import read_by

MOVES = "nccl", "Memcpy PtoP", "Memcpy DtoD"  # begin names of what moves rows between GPUs in a trace


@contextmanager
def assert_overlapped(*ops: str) -> Iterator[None]:
    """Raise an AssertionError unless products are computed while the transfers of these ops are in flight.

    A transfer is in flight from its first send until the last wait for its rows, in the order in which the
    host issues them: so this holds for a graph that is captured, too. On a GPU a trace of eager calls must
    also show that kernels ran while rows moved. All ranks of a group make its calls; each asserts for itself.

    ops: names, such as "column_linear" and "column_linear backward"; none: all that move rows and multiply
    """
    read = CallsRead({})
    traced = torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()
    with read_by(read), profile(activities=[ProfilerActivity.CUDA]) if traced else nullcontext() as trace:
        yield
    moving = [call for call in read.calls if call.transfers]
    asked = [call for call in moving if (call.name in ops if ops else call.products)]
    missing = sorted({*ops} - {call.name for call in asked})
    if missing or not asked:
        movers = ", ".join(dict.fromkeys(call.name for call in moving)) or "no op"
        raise AssertionError(
            f"expected transfers of {', '.join(missing) or 'ops that multiply'}; rows were moved by {movers}"
        )
    transfers = [transfer for call in asked for transfer in call.transfers]
    if bare := [transfer for transfer in transfers if not read.hidden_behind.get(transfer)]:
        listed = "".join(
            f"\n  {transfer}; {transfer.way}" + f"; {transfer.why_bare}" * bool(transfer.why_bare)
            for transfer in bare
        )
        raise AssertionError(f"no product hides {len(bare)} of {len(transfers)} transfers:{listed}")
    if trace is None:
        return
    found = hidden_time(_of_device(trace))
    if not found.moving:
        raise AssertionError("a trace of the GPU shows no transfer: is its profiler (CUPTI) there?")
    if not found.hidden:
        raise AssertionError(
            "products were issued while rows were in flight, but no kernel ran then: transfers took "
            f"{found.moving:.0f} us on the GPU"
        )


class Running(NamedTuple):
    """A kernel or a copy in a trace of a GPU, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


class HiddenTime(NamedTuple):
    """Microseconds of transfers, and of these the part in which another stream ran a kernel."""

    moving: float
    hidden: float


def hidden_time(trace: Iterable[Running]) -> HiddenTime:
    """Return how long rows moved, and how long kernels of other streams ran meanwhile."""
    found = list(trace)
    moves = [each for each in found if each.name.startswith(MOVES)]
    hidden = 0.0
    for move in moves:
        reached = move.start
        for other in sorted(found, key=lambda each: each.start):
            if other.stream != move.stream and not other.name.startswith((*MOVES, "Memset")):
                start, end = max(other.start, reached), min(other.end, move.end)
                hidden += max(0.0, end - start)
                reached = max(reached, end)
    return HiddenTime(sum(move.end - move.start for move in moves), hidden)


def _of_device(trace: profile) -> Iterator[Running]:
    for event in trace.events() or ():
        if event.device_type == DeviceType.CUDA:
            time = event.time_range
            yield Running(event.name, event.device_resource_id, time.start, time.end)
