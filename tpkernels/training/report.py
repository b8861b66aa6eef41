"""A page about a run that stands by itself: its curve of losses, its groups, its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

from tpkernels.topology.plan import GroupPlan
from tpkernels.training.trainer import StepReport

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
_LINE, _GRID, _TEXT = "#2563a8", "#dddddd", "#333333"


def page(
    title: str, facts: Sequence[tuple[str, str]], reports: Sequence[StepReport], plan: GroupPlan, sample: str
) -> str:
    """One HTML file; nothing is loaded from elsewhere.

    facts: name and value of what is worth knowing about the run
    sample: what the model wrote, or nothing
    """
    rows = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; color: {_TEXT} }}
th {{ text-align: left; padding-right: 2em; font-weight: 600; vertical-align: top }}
svg {{ max-width: 100%; height: auto }}
pre {{ white-space: pre-wrap; background: #f5f5f5; padding: 1em }}
</style>
<h1>{escape(title)}</h1>
<table>{rows}</table>
<h2>Loss</h2>
{loss_curve(reports)}
{f"<h2>What it writes</h2><pre>{escape(sample)}</pre>" if sample else ""}
<h2>Groups</h2>
{plan.to_svg()}
<pre>{escape(plan.describe())}</pre>
</html>
"""


def loss_curve(reports: Sequence[StepReport]) -> str:
    """Loss by step, as SVG; a loss that is no number is left out."""
    finite = [report for report in reports if math.isfinite(report.loss)]
    if not finite:
        return "<p>No loss of this run was a number.</p>"
    steps = [report.step for report in finite]
    losses = [report.loss for report in finite]
    low, high, tick = _rounded_range(min(losses), max(losses))
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT}">'
    ]
    for number in range(round((high - low) / tick) + 1):
        loss = low + number * tick
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for step in sorted({first, (first + last) // 2, last}):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">step</text>')
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in zip(steps, losses, strict=True))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    if len(steps) == 1:
        parts.append(f'<circle cx="{x(first):.1f}" cy="{y(losses[0]):.1f}" r="3" fill="{_LINE}"/>')
    return "\n".join([*parts, "</svg>"])


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


def _rounded_range(low: float, high: float) -> tuple[float, float, float]:
    """A range around both, and the distance of its lines: about five of them, at round numbers."""
    rough = max(high - low, 1e-6) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(power * step for step in (1, 2, 5, 10) if power * step >= rough)
    return math.floor(low / tick) * tick, math.ceil(high / tick + 1e-9) * tick, tick
