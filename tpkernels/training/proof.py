"""Losses of a run's first steps, beside those of other layouts of the same ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels.training.config import TrainConfig

# Of a loss, after a few steps whose gradients are added in another order.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2}
FP8_TOLERANCE = 1e-2  # a row-parallel operand's scales are of this rank's features: layouts round unlike


def allowed_by(config: TrainConfig) -> float:
    """Return how far the losses of two layouts may be apart, as a fraction."""
    allowed = TOLERANCES[config.dtype]
    return allowed if config.recipe is None else max(allowed, FP8_TOLERANCE)


@dataclass(frozen=True)
class Proof:
    """Losses of each layout: the run itself first, unsharded last.

    losses: of each layout, step by step
    """

    layouts: Sequence[str]
    losses: Sequence[Sequence[float]]
    allowed: float

    @property
    def steps(self) -> int:
        return len(self.losses[0])

    def difference(self, step: int) -> float:
        """Return the largest difference from the run's own loss in this step, from 0, as a fraction of it."""
        own, *others = (losses[step] for losses in self.losses)
        apart = [abs(loss - own) / abs(own) for loss in others]
        return math.nan if any(map(math.isnan, apart)) else max(apart)

    @property
    def worst(self) -> float:
        apart = [self.difference(step) for step in range(self.steps)]
        return math.nan if any(map(math.isnan, apart)) else max(apart)

    @property
    def holds(self) -> bool:
        return self.worst <= self.allowed  # a loss that is no number proves nothing

    def head(self) -> list[str]:
        return ["step", *self.layouts, "largest difference"]

    def rows(self) -> list[list[str]]:
        return [
            [
                str(step + 1),
                *(f"{losses[step]:.7f}" for losses in self.losses),
                f"{self.difference(step):.1e}",
            ]
            for step in range(self.steps)
        ]

    def table(self) -> str:
        """Return the losses as aligned columns, for a terminal."""
        lines = [self.head(), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            "  ".join(f"{word:<{width}}" for word, width in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join(f"  {line}".rstrip() for line in aligned)

    def bound(self) -> str:
        return f"largest difference {self.worst:.1e} of the loss; allowed {self.allowed:.0e}"

    def __str__(self) -> str:
        return f"losses of {self.steps} steps agree with an unsharded run's within {self.worst:.0e}"
