"""What is left of a run to look at: a page that stands by itself, and its pictures beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tpkernels.pictures.charts import curve
from tpkernels.pictures.figure import NO_MATPLOTLIB, Picture, can_draw, save, sheet
from tpkernels.pictures.lanes import Span, lanes
from tpkernels.pictures.page import facts, page, paragraph, table, verbatim
from tpkernels.topology.plan import GroupPlan
from tpkernels.training.step_trace import SHOWN_RANKS, seconds_at_once
from tpkernels.training.trainer import StepReport

_ROWS = 10  # of the table that stands where there is no curve


def pictures_of(reports: Sequence[StepReport], spans: Sequence[Span], plan: GroupPlan) -> dict[str, Picture]:
    """The loss, the last step where it was recorded, the groups: by name."""
    first, last = reports[0], reports[-1]
    losses = f"Loss: {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"
    points = [(float(report.step), report.loss) for report in reports]
    pictures = {"loss": curve(losses, points, across="step", along="loss, nats per token")}
    if spans:
        shown = len({span.rank for span in spans})
        of_all = f", on {shown} of {plan.world_size} ranks" * (shown < plan.world_size)
        title = f"Step {last.step}: what was computed, and what was in flight{of_all}"
        pictures["timeline"] = lanes(title, {"": spans}, note=at_once(spans))
    return pictures | {"plan": sheet(plan.to_svg())}


def at_once(spans: Sequence[Span]) -> str:
    """How much of what was in flight a rank computed beside."""
    in_flight, hidden = seconds_at_once(spans)
    if not in_flight:
        return "nothing was in flight between ranks"
    share = hidden / in_flight
    return f"ranks computed during {share:.0%} of the time that they had something in flight"


def write(
    path: Path,
    title: str,
    reports: Sequence[StepReport],
    spans: Sequence[Span],
    plan: GroupPlan,
    *,
    known: Sequence[tuple[str, str]] = (),
    sample: str = "",
) -> str:
    """The page, and the pictures as PNG in its folder; returns what to say of the latter.

    known: name and value of what else is worth knowing about the run
    sample: what the model wrote, or nothing
    """
    pictures = pictures_of(reports, spans, plan)
    sections = [("", facts([*known, *facts_of(reports)]))]
    if can_draw():
        sections.append(("Loss", pictures["loss"].svg))
    else:
        sections.append(("Loss", _losses(reports) + paragraph(NO_MATPLOTLIB)))
    if spans:
        words = paragraph(at_once(spans)) + paragraph(_HOW_TO_READ)
        sections.append(("One step", pictures["timeline"].svg + words))
    if sample:
        sections.append(("What it writes", verbatim(sample)))
    sections.append(("Groups", plan.to_svg() + verbatim(plan.describe())))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, sections), encoding="utf-8")
    return save({path.parent / f"{name}.png": picture for name, picture in pictures.items()})


def _losses(reports: Sequence[StepReport]) -> str:
    """Of some steps, the last among them."""
    stride = -(-len(reports) // _ROWS)
    rows = [[str(report.step), f"{report.loss:.4f}"] for report in reversed(reports[::-stride])]
    return table(["step", "loss, nats per token"], rows)


_HOW_TO_READ = (
    f"The last step, as torch's profiler saw it on up to {SHOWN_RANKS} ranks. On a CPU a rank computes while "
    "an operator of torch runs, and a transfer is in flight until it is waited for; on a GPU both are "
    "kernels. Ranks are put together by the clocks of their machines."
)


def facts_of(reports: Sequence[StepReport]) -> list[tuple[str, str]]:
    """Of a run's steps."""
    first, last = reports[0], reports[-1]
    seconds = sum(report.seconds for report in reports)
    speed = statistics.median(report.tokens / report.seconds for report in reports)
    return [
        ("loss", f"{first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}"),
        ("time", f"{seconds:.1f} s in steps"),
        ("speed", f"{speed:,.0f} tokens/s, median step"),
    ]
