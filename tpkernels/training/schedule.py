"""The learning rate of a step: up in a line, then down half a cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float) -> float:
    """Of step number `step`, from 0; `peak` is reached after `warmup` steps, `floor` at the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= steps - 1:
        return floor
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
