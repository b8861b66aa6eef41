"""What ran when, in lanes on one scale: what ranks were doing, in seconds, or one processor, in cycles.

A processor of a GPU works on a tile: its lanes are engines and warps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpkernels.pictures.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    QUIET,
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
NAMES_OF_PROCESSOR, SAID_WIDTH = 1.9, 1.9  # inches, of what is written left and right of its lanes at most
MOST = 1e15  # cycles; what lies beyond is left out
PALE = "#c5ddcd"
FILLS_OF_PROCESSOR = {  # in the order of drawing: waits lie over the epilogue that they are in
    "products": BLUE,
    "copies": ORANGE,
    "stores": VIOLET,
    "instructions": PALE,
    "epilogue": GREEN,
    "waits": GREY,
}


@dataclass(frozen=True)
class TimeSpan:
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


def lanes(
    heading: str, panels: Mapping[str, Sequence[TimeSpan]], *, note: str = "", width: float = WIDTH
) -> Picture:
    """Return a picture of panels, one below the other, each from its own first moment on.

    note: a line below the heading
    width: of the picture, in inches
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
            axes.set_title(shortened(said, 9, width - NAME_WIDTH))
            _draw_panel(axes, spans, factor, longest, width - NAME_WIDTH)
        axes.set_xlabel(f"time, {unit}")

    height = 0.5 + 0.3 * sum(counts) + 0.4 * len(shown)
    return Picture(heading, height, draw, note, legend, width)


def _draw_panel(axes: Axes, spans: Sequence[TimeSpan], factor: float, longest: float, width: float) -> None:
    """width: of the longest panel, in inches"""
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
        inches = width * (span.stop - span.start) / longest
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


def _lanes_of(spans: Sequence[TimeSpan]) -> list[tuple[int, str]]:
    return sorted({span.lane for span in spans})


def _length(spans: Sequence[TimeSpan]) -> float:
    return max(span.stop for span in spans) - min(span.start for span in spans)


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to write so many seconds in, and how many of it make a second."""
    for name, size in (("s", 1.0), ("ms", 1e3)):
        if seconds * size >= 1:
            return name, size
    return "µs", 1e6


def joined(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Return the intervals in order, joined where they overlap or are up to `gap` apart."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


@dataclass(frozen=True)
class Doing:
    """A bar in a lane, from one cycle to another; `what` is a name of FILLS_OF_PROCESSOR."""

    what: str
    start: float
    stop: float


@dataclass(frozen=True)
class Lane:
    """An engine, or warps that do the same.

    said: what is written next to it, such as a share of the time
    """

    name: str
    doings: Sequence[Doing]
    said: str = ""


def processor(heading: str, lanes: Sequence[Lane], *, note: str = "") -> Picture:
    """Return a picture of lanes, one below the other, on one scale of cycles."""
    shown = [Lane(lane.name, [*filter(_drawable, lane.doings)], lane.said) for lane in lanes]
    ends = [end for lane in shown for doing in lane.doings for end in (doing.start, doing.stop)]
    seen = {doing.what for lane in shown for doing in lane.doings}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if not ends:
            nothing(axes, "nothing ran")
            return
        first, last = min(ends), max(ends)
        for place, lane in enumerate(shown):
            _draw_lane(axes, place, lane)
        axes.set_yticks(range(len(shown)), [shortened(lane.name, 9, NAMES_OF_PROCESSOR) for lane in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(first, max(last, first + 1))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("cycles")

    legend = [(fill, what) for what, fill in FILLS_OF_PROCESSOR.items() if what in seen]
    return Picture(heading, 0.7 + 0.3 * len(shown), draw, note, legend)


def _draw_lane(axes: Axes, place: int, lane: Lane) -> None:
    length = max((doing.stop for doing in lane.doings), default=0.0) - min(
        (doing.start for doing in lane.doings), default=0.0
    )
    for what, fill in FILLS_OF_PROCESSOR.items():
        its = [(doing.start, doing.stop - doing.start) for doing in lane.doings if doing.what == what]
        if its:
            bars = axes.broken_barh(its, (place - BAR / 2, BAR), facecolors=fill, linewidth=0)
            cycles = sum(width for _, width in its)
            hint(bars, f"{lane.name}, {what}: {cycles:,.0f} cycles of {length:,.0f}")
    words = axes.text(1.01, place, shortened(lane.said, 8, SAID_WIDTH), va="center", size=8, color=QUIET)
    words.set(transform=axes.get_yaxis_transform())


def _drawable(doing: Doing) -> bool:
    ends = doing.start, doing.stop
    return doing.what in FILLS_OF_PROCESSOR and all(math.isfinite(end) and abs(end) <= MOST for end in ends)
