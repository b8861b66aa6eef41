"""The report of a run: a self-contained page with the curve of losses, and its proof.

A proof compares losses of the run's first steps with those of other layouts of the same ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tpkernels.groups.draw import Unit
from tpkernels.groups.plan import GroupPlan
from tpkernels.pictures.charts import curve
from tpkernels.pictures.figure import (
    NO_MATPLOTLIB,
    can_draw,
    facts,
    page,
    paragraph,
    save,
    table,
    verbatim,
)
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import StepReport

_ROWS = 10  # of the table that replaces the curve
# Relative to a loss, after a few steps with another order of sums.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2}
FP8_TOLERANCE = 1e-2  # scales of row-parallel operands are of a rank's features: layouts round differently


def loss_tolerance(config: TrainConfig) -> float:
    """Return the allowed relative difference between losses of two layouts."""
    allowed = TOLERANCES[config.dtype]
    return allowed if config.recipe is None else max(allowed, FP8_TOLERANCE)


@dataclass(frozen=True)
class Proof:
    """Losses of each layout: the run's own first, the unsharded run's last.

    losses: of each layout, by step
    """

    layouts: Sequence[str]
    losses: Sequence[Sequence[float]]
    allowed: float

    @property
    def steps(self) -> int:
        return len(self.losses[0])

    def difference(self, step: int) -> float:
        """Return the largest relative difference from the run's own loss in a step, counted from 0."""
        own, *others = (losses[step] for losses in self.losses)
        apart = [abs(loss - own) / abs(own) for loss in others]
        return math.nan if any(map(math.isnan, apart)) else max(apart)

    @property
    def worst(self) -> float:
        apart = [self.difference(step) for step in range(self.steps)]
        return math.nan if any(map(math.isnan, apart)) else max(apart)

    @property
    def holds(self) -> bool:
        return self.worst <= self.allowed  # NaN proves nothing

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


def write_report(
    path: Path,
    title: str,
    reports: Sequence[StepReport],
    *,
    plan: GroupPlan,
    unit: Unit,
    known: Sequence[tuple[str, str]] = (),
    proof: Proof | None = None,
    sample: str = "",
) -> str:
    """Write the page, and its curve as loss.png into its folder; return a line about that picture.

    known: names and values of facts about the run
    sample: text that the model wrote, or ""
    """
    first, last = reports[0], reports[-1]
    heading = f"Loss: {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"
    points = [(float(report.step), report.loss) for report in reports]
    losses = curve(heading, points, across="step", along="loss, nats per token")
    sections = [("", facts([*known, *facts_of(reports)]))]
    if proof is not None:
        sections.append(("The same losses as unsharded", _proof(proof)))
    if can_draw():
        sections.append(("Loss", losses.svg))
    else:
        sections.append(("Loss", _losses(reports) + paragraph(NO_MATPLOTLIB)))
    if sample:
        sections.append(("What it writes", verbatim(sample)))
    groups = plan.to_svg(unit=unit) + verbatim(plan.describe(unit=unit))
    sections.append(("Groups", groups))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, sections), encoding="utf-8")
    return save({path.with_name("loss.png"): losses})


def _proof(proof: Proof) -> str:
    return (
        paragraph(
            f"Losses of the first {proof.steps} steps, in nats per token: of this run; of the same in "
            "the other schedule, overlapped or sequential; of an unsharded one, in which each rank holds all "
            "weights. All begin with the same weights, and learn from the same excerpts."
        )
        + table(proof.head(), proof.rows())
        + paragraph(f"{proof.bound()[0].upper()}{proof.bound()[1:]}.")
    )


def _losses(reports: Sequence[StepReport]) -> str:
    """Return a table of the losses of some steps, with the last."""
    stride = -(-len(reports) // _ROWS)
    rows = [[str(report.step), f"{report.loss:.4f}"] for report in reversed(reports[::-stride])]
    return table(["step", "loss, nats per token"], rows)


def facts_of(reports: Sequence[StepReport]) -> list[tuple[str, str]]:
    """Return names and values of facts about a run's steps."""
    first, last = reports[0], reports[-1]
    seconds = sum(report.seconds for report in reports)
    speed = statistics.median(report.tokens / report.seconds for report in reports)
    return [
        ("loss", f"{first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}"),
        ("time", f"{seconds:.1f} s in steps"),
        ("speed", f"{speed:,.0f} tokens/s, median step"),
    ]
