"""Profiles one step with torch's profiler: names of phases, a trace, and spans of each rank's work.

A trace is for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tpkernels.pictures.charts import TimeSpan, merged_intervals

WARM_UP = 3  # the first steps learn the buckets' order and touch memory for the first time
SHOWN_RANKS = 8  # the first ranks; a picture of more is too high
_GAP = 1e-3  # of the step: spans with smaller gaps are drawn as one
_BACKWARD = "autograd::engine::evaluate_function"  # autograd's name of each node
_TRANSFERS = ("gloo:", "nccl", "Memcpy PtoP")

Result = TypeVar("Result")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a block, or a decorated function, in traces, and on GPUs as an NVTX range."""
    named = f"tpkernels: {name}"
    with record_function(named):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(named):
            yield


class StepProfile:
    """A context for every step of a run that records one step; a run survives a failed write of the trace."""

    def __init__(self, folder: Path, rank: int, *, done: int, steps: int, step: int | None = None) -> None:
        """done, steps: the steps before and at the end of the run; step: by default one after warm-up"""
        folder.mkdir(parents=True, exist_ok=True)
        self.step = min(done + WARM_UP + 1, steps) if step is None else step
        self.path = folder / f"step-{self.step:08}-rank-{rank}.json"
        self.came = False
        self._done, self._steps = done, steps

    @property
    def comes(self) -> bool:
        """Whether the step to record is one of this run."""
        return self._done < self.step <= self._steps

    def outcome(self) -> str:
        """Return the profile's outcome in a line."""
        if not self.came:
            began = f"this run began after {self._done} of {self._steps}"
            return f"no profile: step {self.step} did not come; {began}"
        if not self.path.is_file():
            return f"no profile: {self.path} could not be written"
        return f"profile of step {self.step}: {self.path.parent}/step-{self.step:08}-rank-*.json"

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step != self.step:
            yield
            return
        with profile(activities=_activities()) as trace:
            yield
        self.came = True
        with suppress(OSError):
            trace.export_chrome_trace(str(self.path))


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]


@dataclass(frozen=True, slots=True)
class ProfiledEvent:
    """An event of the profiler, in seconds since 1970."""

    name: str
    start: float
    stop: float
    thread: int
    on_device: bool
    number: int  # of an operator
    launched_by: int  # the operator's number, for a kernel and for the call that launched it


def traced(step: Callable[[], Result]) -> tuple[Result, list[TimeSpan]]:
    """Run `step`; return its result and, on rank 0, the spans of the first ranks; called by all ranks."""
    if dist.get_rank() < SHOWN_RANKS:
        result, spans = _recorded(step)
    else:
        result, spans = step(), []
    gathered: list[list[TimeSpan]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(spans, gathered)
    return result, list(chain(*gathered or []))


def _recorded(step: Callable[[], Result]) -> tuple[Result, list[TimeSpan]]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it reports start and stop on stderr
    with profile(activities=_activities()) as profiler:
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
    return result, spans_of(dist.get_rank(), events, on_gpu=torch.cuda.is_available())


def spans_of(rank: int, events: Sequence[ProfiledEvent], *, on_gpu: bool) -> list[TimeSpan]:
    """Return the spans in which a rank computed, by phase, and in which it had transfers in flight.

    On a GPU kernels count, on a CPU operators of torch, without Python code between them.
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
        TimeSpan(rank, "computes", "", start, stop, phase)
        for phase in dict.fromkeys(phases)
        for start, stop in union(
            (event for event, its in zip(work, phases, strict=True) if its == phase), _GAP * length
        )
    ]
    flights = union(transfers, 0.0)
    return spans + [TimeSpan(rank, "transfers", "", start, stop) for start, stop in flights]


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
    """Return the union of the events' intervals, in order, joined over gaps up to `gap`."""
    return merged_intervals([(event.start, event.stop) for event in events], gap)


def seconds_at_once(spans: Sequence[TimeSpan]) -> tuple[float, float]:
    """Return seconds with transfers in flight, and seconds of these with computation, over all ranks."""
    in_flight = hidden = 0.0
    for rank in {span.rank for span in spans}:
        own = sorted((span.start, span.stop, span.doing) for span in spans if span.rank == rank)
        flights = [(start, stop) for start, stop, doing in own if doing == "transfers"]
        work = [(start, stop) for start, stop, doing in own if doing == "computes"]
        in_flight += sum(stop - start for start, stop in flights)
        hidden += _common(flights, work)
    return in_flight, hidden


def _common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return the seconds in the intersection of two ordered lists of intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total
