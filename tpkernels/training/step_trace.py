"""One step as torch's profiler sees it: when a rank computed, and when something of it was in flight."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tpkernels.pictures.lanes import Span

SHOWN_RANKS = 8  # the first ones; a picture of more is too high to be looked at
_GAP = 1e-3  # of the step: what is less apart is drawn as one
_BACKWARD = "autograd::engine::evaluate_function"  # how autograd names each node that it runs
_TRANSFERS = ("gloo:", "nccl", "Memcpy PtoP")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ProfiledEvent:
    """An event of the profiler, in seconds since 1970."""

    name: str
    start: float
    stop: float
    thread: int
    on_device: bool
    number: int  # of an operator
    launched_by: int  # of a kernel, and of the call that launched it: the operator's number


def traced(step: Callable[[], Result]) -> tuple[Result, list[Span]]:
    """Run `step`; return its result and, on rank 0, the spans of the first ranks; called by all ranks."""
    if dist.get_rank() < SHOWN_RANKS:
        result, spans = _recorded(step)
    else:
        result, spans = step(), []
    gathered: list[list[Span]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(spans, gathered)
    return result, list(chain(*gathered or []))


def _recorded(step: Callable[[], Result]) -> tuple[Result, list[Span]]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it writes on stderr that it starts and stops
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        result = step()
    kineto = profiler.profiler
    assert kineto is not None, "it was started"
    assert kineto.kineto_results is not None, "and stopped"
    events = [
        ProfiledEvent(
            event.name(),
            1e-9 * event.start_ns(),
            1e-9 * event.end_ns(),
            event.start_thread_id(),
            event.device_type() != DeviceType.CPU,
            event.correlation_id(),
            event.linked_correlation_id(),
        )
        for event in kineto.kineto_results.events()
        if event.device_type() == DeviceType.CPU or not event.is_user_annotation()  # which hold kernels
    ]
    return result, spans_of(dist.get_rank(), events, on_gpu=on_gpu)


def spans_of(rank: int, events: Sequence[ProfiledEvent], *, on_gpu: bool) -> list[Span]:
    """Return the spans in which a rank computed, by phase, and in which it had transfers in flight.

    On a GPU kernels count, on a CPU operators of torch: what Python does between them does not.
    """
    nodes = _Nodes([event for event in events if event.name.startswith(_BACKWARD)])
    operators = [event for event in events if not event.on_device and not event.launched_by]
    if on_gpu:
        by_number = {event.number: event for event in operators}
        seen = [event for event in events if event.on_device]
        work = [event for event in seen if not event.name.startswith((*_TRANSFERS, "Mem"))]
        phases = [nodes.phase_of(by_number.get(event.launched_by, event)) for event in work]
    else:
        seen = operators
        ours = (event for event in seen if event.thread in nodes.threads)  # gloo's threads copy, too
        work = [event for event in ours if event.name.startswith("aten::")]
        phases = [nodes.phase_of(event) for event in work]
    transfers = [event for event in seen if event.name.startswith(_TRANSFERS)]
    everything = [*work, *transfers]
    if not everything:
        return []
    length = max(event.stop for event in everything) - min(event.start for event in everything)
    spans = [
        Span(rank, "computes", "", start, stop, phase)
        for phase in dict.fromkeys(phases)
        for start, stop in union(
            (event for event, its in zip(work, phases, strict=True) if its == phase), _GAP * length
        )
    ]
    flights = union(transfers, 0.0)
    return spans + [Span(rank, "transfers", "", start, stop) for start, stop in flights]


class _Nodes:
    """The nodes of backward passes that autograd ran."""

    def __init__(self, nodes: Sequence[ProfiledEvent]) -> None:
        self.threads = {node.thread for node in nodes}
        self._ends = max((node.stop for node in nodes), default=float("inf"))
        self._intervals = {
            thread: union((node for node in nodes if node.thread == thread), 0.0) for thread in self.threads
        }

    def phase_of(self, event: ProfiledEvent) -> str:
        intervals = self._intervals.get(event.thread, [])
        before = bisect_right(intervals, (event.start, float("inf")))
        if before and event.start < intervals[before - 1][1]:
            return "backward"
        return "optimizer" if event.start >= self._ends else "forward"


def union(events: Iterable[ProfiledEvent], gap: float) -> list[tuple[float, float]]:
    """Return the intervals in which some event went on, in order, joined over pauses up to `gap`."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if found and event.start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], event.stop)
        else:
            found.append((event.start, event.stop))
    return found


def seconds_at_once(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the seconds with transfers in flight, and those of them with computation, over all ranks."""
    in_flight = hidden = 0.0
    for rank in {span.rank for span in spans}:
        own = sorted((span.start, span.stop, span.doing) for span in spans if span.rank == rank)
        flights = [(start, stop) for start, stop, doing in own if doing == "transfers"]
        work = [(start, stop) for start, stop, doing in own if doing == "computes"]
        in_flight += sum(stop - start for start, stop in flights)
        hidden += _common(flights, work)
    return in_flight, hidden


def _common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return the seconds that lie in intervals of both, each list in order."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total
