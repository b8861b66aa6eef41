"""Charts: a value by step as a curve, ratios as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpkernels.pictures.figure import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    QUIET,
    WIDTH,
    Picture,
    draw_empty,
    hint,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


LEAST, MOST = 1e-9, 1e9  # what a logarithmic axis holds; anything else is written or counted, not drawn
HUGE = 1e30  # of a curve's values
NAME_WIDTH = 4.2  # inches, of a bar's name at most
WIN, LOSS, EVEN = "faster", "slower", "within the spread"
FILLS = {WIN: BLUE, LOSS: ORANGE, EVEN: GREY}


def curve(heading: str, points: Sequence[tuple[float, float]], *, across: str, along: str) -> Picture:
    """Return a picture of a value by step.

    points: (x, y) by rising x; a y that is no number, or too large, is left out and counted
    across, along: what x and y are
    """
    shown = [(x, y) for x, y in points if math.isfinite(x) and abs(y) <= HUGE]

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        if not shown:
            draw_empty(axes, "nothing to draw")
            return
        end, value = shown[-1]
        axes.plot(*zip(*shown, strict=True), color=BLUE, linewidth=1.6, marker="o" * (len(shown) == 1))
        axes.plot([end], [value], "o", color=BLUE, markersize=5)
        axes.annotate(f" {value:.4g}", (end, value), va="center", weight="bold", annotation_clip=False)
        axes.grid(axis="y")
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        axes.set_xlabel(shortened(across, 9, WIDTH))
        axes.set_ylabel(shortened(along, 9, 2))

    left_out = len(points) - len(shown)
    return Picture(heading, 3.4, draw, f"{left_out:,} of {len(points):,} cannot be drawn" * bool(left_out))


@dataclass(frozen=True)
class Bar:
    """A ratio, and the two ends of its spread where they are known."""

    name: str
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def is_drawable(self) -> bool:
        return LEAST <= self.ratio <= MOST

    @property
    def spread(self) -> tuple[float, float]:
        """Around the ratio; of no length where it is not known."""
        ends = [end for end in (self.low, self.high) if end is not None and LEAST <= end <= MOST]
        return min([self.ratio, *ends]), max([self.ratio, *ends])

    @property
    def verdict(self) -> str:
        """A ratio whose spread has 1.0 in it is neither a win nor a loss."""
        low, high = self.spread
        if low <= 1 <= high:
            return EVEN
        return WIN if low > 1 else LOSS


def bars(heading: str, rows: Sequence[Bar], *, note: str = "", across: str = "times as fast") -> Picture:
    """Return a picture of ratios as bars from 1.0, on a logarithmic axis: twice is as long as half."""
    drawable = {place: row for place, row in enumerate(rows) if row.is_drawable}
    verdicts = [row.verdict for row in drawable.values()]

    legend = [(fill, f"{verdicts.count(verdict)} {verdict}") for verdict, fill in FILLS.items()]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if not rows:
            draw_empty(axes, "nothing to compare")
            return
        for place, row in drawable.items():
            low, high = row.spread
            (bar,) = axes.barh(place, row.ratio - 1, 0.6, left=1, color=FILLS[row.verdict])
            hint(bar, f"{row.name}: {row.ratio:.4g}, spread {low:.4g} to {high:.4g}")
            if low < high:
                axes.plot([low, high], [place, place], "|-", color=INK, linewidth=1, markersize=6)
        for place, row in enumerate(rows):
            is_clear = row.is_drawable and row.verdict != EVEN
            words = axes.text(
                1.01, place, _written(row), va="center", weight="bold" if is_clear else "normal"
            )
            words.set(transform=axes.get_yaxis_transform(), color=INK if row.is_drawable else QUIET)
        axes.set_yticks(range(len(rows)), [shortened(row.name, 9, NAME_WIDTH) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        ends = [end for row in drawable.values() for end in row.spread]
        axes.set_xscale("log")
        axes.set_xlim(min([*ends, 0.9]) / 1.05, max([*ends, 1.1]) * 1.05)
        _round_ticks(axes.xaxis)
        axes.grid(axis="x")
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xlabel(shortened(across, 9, WIDTH / 2))

    return Picture(heading, 0.6 + 0.22 * len(rows), draw, note, legend)


def _written(row: Bar) -> str:
    if math.isnan(row.ratio):
        return "no number"
    return f"{row.ratio:.2f}" if 0.1 <= row.ratio < 1000 else f"{row.ratio:.3g}"


def _round_ticks(axis: Axis) -> None:
    """Label a logarithmic axis in plain numbers, the finer the fewer decades it has."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    if decades < 0.4:
        axis.set_major_locator(MaxNLocator(9))
    elif decades < 2.5:
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if decades < 1.2 else (1, 2, 5)))
    else:
        apart = math.ceil(decades / 8)
        powers = range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1)
        axis.set_major_locator(FixedLocator([10.0**power for power in powers if power % apart == 0]))
    axis.set_major_formatter(StrMethodFormatter("{x:.6g}"))
    axis.set_minor_locator(NullLocator())
