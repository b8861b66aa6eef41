"""From values to places on an axis, and the round numbers that are written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high`, which lie at `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


@dataclass(frozen=True)
class LogScale:
    """Like `Scale`, for values above zero: equal factors are equally long."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.stop - self.start)


def round_step(length: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, of which `length` holds at most so many."""
    rough = max(length / most, 1e-300)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most about so many round numbers, the first not above `low` and the last not below `high`."""
    if low == high:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    length = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-290)  # what a double can tell apart
    step = round_step(length, most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


# Of a decade, from the finest choice to the coarsest; each holds those after it.
_FACTORS = (
    (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    (1, 1.2, 1.5, 2, 3, 5, 7),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 5),
    (1,),
)


def log_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """At most so many round numbers from `low` to `high`, both above zero, and 1.0 if it is between them."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for factors in _FACTORS:
        ticks = [round(factor * 10.0**decade, 12 - decade) for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            return ticks
    stride = -(-len(ticks) // most)
    return [tick for tick in ticks if round(math.log10(tick)) % stride == 0]


def labels(ticks: Sequence[float]) -> list[str]:
    """As few digits as tell them apart, but up to five."""
    for digits in range(5, 16):
        written = [f"{tick:.{digits}g}" for tick in ticks]
        if len(set(written)) == len(ticks):
            break
    return written
