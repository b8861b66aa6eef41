"""Ways to do the same thing, timed side by side: what counts is their ratio, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Way = Callable[[], object]
Clock = Callable[[Way], float]
Seconds = dict[str, list[float]]  # of each way, round by round

WARM_UPS = 3


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, ours and another way's, interleaved."""

    ours: list[float]
    other: list[float]

    @property
    def ratios(self) -> list[float]:
        return sorted(theirs / own for own, theirs in zip(self.ours, self.other, strict=True))

    @property
    def ratio(self) -> float:
        """How many times faster ours is: the median over rounds."""
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds' ratios lie between these."""
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high


def interleave(
    ways: Mapping[str, T], rounds: int, clock: Callable[[T], float], warm_ups: int = WARM_UPS
) -> Seconds:
    """The order turns, so that none is always first. What the first rounds took is not told: they warm up."""
    seconds: Seconds = {name: [] for name in ways}
    names = list(ways)
    for round_ in range(warm_ups + rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(clock(ways[name]))
    return {name: taken[warm_ups:] for name, taken in seconds.items()}


def slowest(by_rank: Sequence[Seconds]) -> Seconds:
    """A way has taken a round when its last rank has."""
    return {
        name: [max(times) for times in zip(*(seconds[name] for seconds in by_rank), strict=True)]
        for name in by_rank[0]
    }


def seconds_on_clock(way: Way) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def seconds_of_processor(calls: int) -> Clock:
    """Return a clock of processor time, for ways of one process: a busy neighbour does not count.

    calls: timed in a row and divided, as one call may be too short for a clock
    """

    def clock(way: Way) -> float:
        start = time.process_time()
        for _ in range(calls):
            way()
        return (time.process_time() - start) / calls

    return clock


def seconds_after_a_barrier(way: Way) -> float:
    """For ways of several ranks, which start together, and wait for each other."""
    dist.barrier()
    return seconds_on_clock(way)


def seconds_on_gpu(way: Way) -> float:
    """By events around one call, from a cold L2 cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _cache_filler().zero_()
    start.record()
    way()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def as_graph(way: Way) -> Way:
    """A way, called before, as a CUDA graph: what remains is its kernels' time, without their launches'."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay


@cache
def _cache_filler() -> Tensor:
    return torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")  # several times the L2 of an H200
