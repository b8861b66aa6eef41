"""The report of a run: a self-contained page, its pictures as files, and its proof.

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
from tpkernels.pictures.charts import TimeSpan, curve, lanes
from tpkernels.pictures.figure import (
    NO_MATPLOTLIB,
    Picture,
    can_draw,
    facts,
    page,
    paragraph,
    save,
    sheet,
    table,
    verbatim,
)
from tpkernels.training.config import TrainConfig
from tpkernels.training.profile import SHOWN_RANKS, seconds_at_once
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


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a page about a run.

    spans: of the last step, if it was recorded
    known: names and values of further facts
    sample: text that the model wrote, or ""
    """

    title: str
    reports: Sequence[StepReport]
    spans: Sequence[TimeSpan]
    plan: GroupPlan
    on_gpu: bool
    known: Sequence[tuple[str, str]] = ()
    proof: Proof | None = None
    sample: str = ""

    @property
    def unit(self) -> Unit:
        return "GPU" if self.on_gpu else "rank"


def pictures_of(run: RunRecord) -> dict[str, Picture]:
    """Return pictures by name: the loss, the last step if it was recorded, the groups."""
    reports, spans, plan = run.reports, run.spans, run.plan
    first, last = reports[0], reports[-1]
    losses = f"Loss: {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"
    points = [(float(report.step), report.loss) for report in reports]
    pictures = {"loss": curve(losses, points, across="step", along="loss, nats per token")}
    if spans:
        shown = len({span.rank for span in spans})
        of_all = f", on {shown} of {plan.world_size} ranks" * (shown < plan.world_size)
        title = f"Step {last.step}: what was computed, and what was in flight{of_all}"
        pictures["timeline"] = lanes(title, {"": spans}, note=at_once(spans))
    return pictures | {"plan": sheet(plan.to_svg(unit=run.unit))}


def at_once(spans: Sequence[TimeSpan]) -> str:
    """Return in words the fraction of the time in flight during which ranks computed."""
    in_flight, hidden = seconds_at_once(spans)
    if not in_flight:
        return "nothing was in flight between ranks"
    share = hidden / in_flight
    return f"ranks computed during {share:.0%} of the time that they had something in flight"


def write_report(path: Path, run: RunRecord) -> str:
    """Write the page, and the pictures as PNG into its folder; return a line about the pictures."""
    pictures = pictures_of(run)
    sections = [("", facts([*run.known, *facts_of(run.reports)]))]
    if run.proof is not None:
        sections.append(("The same losses as unsharded", _proof(run.proof)))
    if can_draw():
        sections.append(("Loss", pictures["loss"].svg))
    else:
        sections.append(("Loss", _losses(run.reports) + paragraph(NO_MATPLOTLIB)))
    if run.spans:
        words = paragraph(at_once(run.spans)) + paragraph(_how_to_read(run.on_gpu))
        sections.append(("One step", pictures["timeline"].svg + words))
    if run.sample:
        sections.append(("What it writes", verbatim(run.sample)))
    groups = run.plan.to_svg(unit=run.unit) + verbatim(run.plan.describe(unit=run.unit))
    sections.append(("Groups", groups))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(run.title, sections), encoding="utf-8")
    return save({path.parent / f"{name}.png": picture for name, picture in pictures.items()})


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


def _how_to_read(on_gpu: bool) -> str:
    if on_gpu:
        seen = "A rank computes while a kernel runs, and a transfer is in flight while its kernel does."
    else:
        seen = "A rank computes while an operator of torch runs; a transfer is in flight until it is awaited."
    return (
        f"The last step, as torch's profiler saw it on up to {SHOWN_RANKS} ranks. {seen} Ranks are put "
        "together by the clocks of their machines."
    )


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
