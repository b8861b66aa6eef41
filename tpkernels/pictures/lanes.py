"""What ran when: a lane for each rank and what it was doing, on one scale of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpkernels.pictures.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    VIOLET,
    WIDTH,
    Picture,
    hint,
    nothing,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME_WIDTH = 2.4  # inches, of a lane's name at most
BAR = 0.76  # of a lane's height
FILLS = {  # in the order of a legend
    "forward": BLUE,
    "backward": VIOLET,
    "optimizer": GREEN,
    "computes": BLUE,
    "receives": ORANGE,
    "transfers": ORANGE,
}


@dataclass(frozen=True)
class Span:
    """An interval of one rank, in seconds of a clock that all ranks share."""

    rank: int
    doing: str  # what its lane is for
    name: str  # may be empty
    start: float
    stop: float
    phase: str = ""  # what its colour says, where that is not what it is doing

    @property
    def lane(self) -> tuple[int, str]:
        return self.rank, self.doing


def lanes(heading: str, panels: Mapping[str, Sequence[Span]], *, note: str = "") -> Picture:
    """Return a picture of panels, one below the other, each from its own first moment on.

    note: a line below the heading
    """
    shown = {title: spans for title, spans in panels.items() if spans}
    seen = {span.phase or span.doing for spans in shown.values() for span in spans}
    legend = [(fill, what) for what, fill in FILLS.items() if what in seen]
    counts = [len(_lanes_of(spans)) for spans in shown.values()]
    longest = max((_length(spans) for spans in shown.values()), default=0.0) or 1e-9

    def draw(figure: Figure) -> None:
        if not shown:
            nothing(figure.subplots(), "nothing was recorded")
            return
        grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=counts)
        unit, factor = unit_of(longest)
        for axes, (title, spans) in zip(grid[:, 0], shown.items(), strict=True):
            length = f"{factor * _length(spans):.3g} {unit}"
            said = f"{title}: {length}" if title else length
            axes.set_title(shortened(said, 9, WIDTH - NAME_WIDTH))
            _draw_panel(axes, spans, factor, longest)
        axes.set_xlabel(f"time, {unit}")

    height = 0.5 + 0.3 * sum(counts) + 0.4 * len(shown)
    return Picture(heading, height, draw, note, legend)


def _draw_panel(axes: Axes, spans: Sequence[Span], factor: float, longest: float) -> None:
    begin, rows = min(span.start for span in spans), _lanes_of(spans)
    starts = [factor * (span.start - begin) for span in spans]
    widths = [factor * (span.stop - span.start) for span in spans]
    places = [rows.index(span.lane) for span in spans]
    fills = [FILLS.get(span.phase or span.doing, GREY) for span in spans]
    drawn = axes.barh(places, widths, BAR, left=starts, color=fills, edgecolor=PAPER, linewidth=0.4)
    for span, bar, fill in zip(spans, drawn, fills, strict=True):
        unit, scale = unit_of(span.stop - span.start)
        lasted = f"{scale * (span.stop - span.start):.3g} {unit}"
        hint(bar, f"{span.name or span.phase or span.doing}: {lasted}")
        inches = (WIDTH - NAME_WIDTH) * (span.stop - span.start) / longest
        if inches < 0.02:
            bar.set_edgecolor(fill)  # else nothing of it would be seen
        short = span.name.rpartition(" ")[2]  # of "piece 3" the number
        label = next((name for name in (span.name, short) if name == shortened(name, 8, inches)), "")
        x, y = bar.get_center()
        axes.text(x, y, label, size=8, color=PAPER, ha="center", va="center")
    axes.set_yticks(
        range(len(rows)), [shortened(f"rank {rank} {doing}", 9, NAME_WIDTH) for rank, doing in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, factor * longest * 1.01)
    axes.grid(axis="x")
    axes.axvline(factor * _length(spans), color=INK, linewidth=1.2)


def _lanes_of(spans: Sequence[Span]) -> list[tuple[int, str]]:
    return sorted({span.lane for span in spans})


def _length(spans: Sequence[Span]) -> float:
    return max(span.stop for span in spans) - min(span.start for span in spans)


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to write so many seconds in, and how many of it make a second."""
    for name, size in (("s", 1.0), ("ms", 1e3)):
        if seconds * size >= 1:
            return name, size
    return "µs", 1e6
