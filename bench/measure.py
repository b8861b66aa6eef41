"""Ways to do the same thing, timed side by side: what counts is their ratio, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Way = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, ours and another way's, taken alternately."""

    ours: list[float]
    naive: list[float]

    @property
    def ratios(self) -> list[float]:
        return sorted(theirs / own for own, theirs in zip(self.ours, self.naive, strict=True))

    @property
    def ratio(self) -> float:
        """How many times faster ours is: the median over rounds."""
        return statistics.median(self.ratios)

    def as_info(self) -> dict[str, float]:
        """For a benchmark's `extra_info`; half of the rounds lie between the two quartiles."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return {
            "ratio": round(self.ratio, 3),
            "ratio_quartile_low": round(low, 3),
            "ratio_quartile_high": round(high, 3),
            "ours_ms": round(1e3 * statistics.median(self.ours), 4),
            "naive_ms": round(1e3 * statistics.median(self.naive), 4),
            "rounds": len(self.ours),
        }

    def __str__(self) -> str:
        info = self.as_info()
        spread = f"{info['ratio_quartile_low']:.2f} to {info['ratio_quartile_high']:.2f}"
        times = f"{info['ours_ms']:.2f} ms against {info['naive_ms']:.2f} ms"
        return f"{info['ratio']:.2f}x ({spread} in the middle half of {info['rounds']} rounds; {times})"


def compare(ours: Way, naive: Way, rounds: int) -> Comparison:
    """Time two ways on this machine's clock."""
    seconds = interleave({"ours": ours, "naive": naive}, rounds, seconds_on_cpu)
    return Comparison(seconds["ours"], seconds["naive"])


def interleave(ways: Mapping[str, Way], rounds: int, clock: Callable[[Way], float]) -> dict[str, list[float]]:
    """Seconds of each way in each round. The order turns, so that none is always first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(clock(ways[name]))
    return seconds


def slowest(by_rank: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Seconds of each round over all ranks: a way has taken a round when its last rank has."""
    return {
        name: [max(times) for times in zip(*(seconds[name] for seconds in by_rank), strict=True)]
        for name in by_rank[0]
    }


def seconds_on_cpu(way: Way) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def seconds_on_gpu(way: Way) -> float:
    """By events around one call, from a cold L2 cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _cache_filler().zero_()
    start.record()
    way()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


@cache
def _cache_filler() -> Tensor:
    return torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")  # several times the L2 of an H200
