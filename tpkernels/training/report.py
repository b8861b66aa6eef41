"""What is left of a run to look at: a page that stands by itself, and its pictures beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tpkernels.pictures import png
from tpkernels.pictures.curve import curve
from tpkernels.pictures.lanes import Span, lanes
from tpkernels.pictures.page import facts, page, paragraph, verbatim
from tpkernels.topology.plan import GroupPlan
from tpkernels.training.step_trace import SHOWN_RANKS, seconds_at_once
from tpkernels.training.trainer import StepReport


def pictures_of(reports: Sequence[StepReport], spans: Sequence[Span], plan: GroupPlan) -> dict[str, str]:
    """The loss, the last step where it was recorded, the groups: SVG by name."""
    first, last = reports[0], reports[-1]
    losses = f"Loss: {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"
    pictures = {"loss": curve(losses, [(report.step, report.loss) for report in reports], across="step")}
    if spans:
        shown = len({span.rank for span in spans})
        of_all = f", on {shown} of {plan.world_size} ranks" * (shown < plan.world_size)
        title = f"Step {last.step}: what was computed, and what was in flight{of_all}"
        pictures["timeline"] = lanes(title, {"": spans}, note=at_once(spans))
    return pictures | {"plan": plan.to_svg()}


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
    known: Sequence[tuple[str, str]],
    pictures: dict[str, str],
    plan: GroupPlan,
    sample: str,
) -> str:
    """The page, and the pictures as PNG in its folder; returns what to say of the latter.

    known: name and value of what is worth knowing about the run
    sample: what the model wrote, or nothing
    """
    sections = [("", facts(known)), ("Loss", pictures["loss"])]
    if "timeline" in pictures:
        sections.append(("One step", pictures["timeline"] + paragraph(_HOW_TO_READ)))
    if sample:
        sections.append(("What it writes", verbatim(sample)))
    sections.append(("Groups", pictures["plan"] + verbatim(plan.describe())))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, sections), encoding="utf-8")
    return png.save({path.parent / f"{name}.png": svg for name, svg in pictures.items()})


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
