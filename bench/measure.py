"""Two ways to do the same thing, timed side by side: what counts is their ratio, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, ours and the naive way's, taken alternately."""

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
            "ours_ms": round(1e3 * statistics.median(self.ours), 3),
            "naive_ms": round(1e3 * statistics.median(self.naive), 3),
            "rounds": len(self.ours),
        }

    def __str__(self) -> str:
        info = self.as_info()
        spread = f"{info['ratio_quartile_low']:.2f} to {info['ratio_quartile_high']:.2f}"
        times = f"{info['ours_ms']:.2f} ms against {info['naive_ms']:.2f} ms"
        return f"{info['ratio']:.2f}x ({spread} in the middle half of {info['rounds']} rounds; {times})"


def compare(ours: Callable[[], object], naive: Callable[[], object], rounds: int) -> Comparison:
    """Time both in turn, each going first every other round."""
    seconds: dict[Callable[[], object], list[float]] = {ours: [], naive: []}
    for round_ in range(rounds):
        for way in (ours, naive) if round_ % 2 else (naive, ours):
            start = time.perf_counter()
            way()
            seconds[way].append(time.perf_counter() - start)
    return Comparison(seconds[ours], seconds[naive])
