"""A value by step, ratios as bars, and work under the roof of a GPU.

What ran when, in lanes on one scale: what ranks were doing, in seconds, or one processor, in cycles.

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
    draw_empty,
    hint,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


LEAST, MOST = 1e-9, 1e9  # what a logarithmic axis holds; anything else is written or counted, not drawn
HUGE = 1e30  # of a curve's values
NAME_WIDTH = 4.2  # inches, of a bar's name at most
WIN, LOSS, EVEN = "faster", "slower", "within the spread"
FILLS = {WIN: BLUE, LOSS: ORANGE, EVEN: GREY}
SERIES = (BLUE, ORANGE, GREEN, VIOLET)


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


@dataclass(frozen=True)
class TimedWork:
    """One timed piece of work."""

    name: str
    series: str  # what its colour says
    flops: float
    bytes: float
    seconds: float

    @property
    def density(self) -> float:
        """Operations per byte; NaN where that cannot be told."""
        return self.flops / self.bytes if self.bytes > 0 else math.nan

    @property
    def speed(self) -> float:
        """Tflop/s; NaN where that cannot be told."""
        return self.flops / self.seconds / 1e12 if self.seconds > 0 else math.nan

    @property
    def is_drawable(self) -> bool:
        return all(LEAST <= number <= MOST for number in (self.density, self.speed))


def roofline(heading: str, works: Sequence[TimedWork], *, flops: float, bytes: float) -> Picture:
    """Return a roofline: operations per second against operations per byte, under a data sheet's roof.

    flops, bytes: what the device does in a second at best
    """
    shown = [work for work in works if work.is_drawable]
    colours = {
        name: SERIES[i % len(SERIES)] for i, name in enumerate(dict.fromkeys(work.series for work in works))
    }
    ridge, peak = flops / bytes, flops / 1e12

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        densities, speeds = [work.density for work in shown], [work.speed for work in shown]
        left, right = min([*densities, ridge / 4]) / 1.2, max([*densities, ridge * 4]) * 1.2
        low, high = min([*speeds, peak / 4]) / 1.2, max([*speeds, peak]) * 1.2
        start = max(left, low * 1e12 / bytes)
        axes.plot([start, ridge, right], [start * bytes / 1e12, peak, peak], color=INK, linewidth=1.5)
        for work in shown:
            (dot,) = axes.plot(
                [work.density], [work.speed], "o", color=colours[work.series], markeredgecolor=PAPER
            )
            share = max(work.flops / flops, work.bytes / bytes) / work.seconds
            hint(dot, f"{work.name}, {work.series}: {work.speed:.4g} Tflop/s, {share:.0%} of the roof")
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
        _round_ticks(axes.xaxis)
        _round_ticks(axes.yaxis)
        axes.grid()
        axes.set_xlabel("operations per byte")
        axes.set_ylabel("Tflop/s")

    note = f"roof: {peak:,.0f} Tflop/s, {bytes / 1e12:.3g} TB/s"
    if left_out := len(works) - len(shown):
        note += f"; {left_out:,} of {len(works):,} cannot be drawn"
    return Picture(heading, 4.6, draw, note, [(colour, name) for name, colour in colours.items()])


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


LANE_NAME_WIDTH = 2.4  # inches, of a lane's name at most
BAR = 0.76  # of a lane's height
PHASE_FILLS = {  # in the order of a legend
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
    legend = [(fill, what) for what, fill in PHASE_FILLS.items() if what in seen]
    counts = [len(_lanes_of(spans)) for spans in shown.values()]
    longest = max((_length(spans) for spans in shown.values()), default=0.0) or 1e-9

    def draw(figure: Figure) -> None:
        if not shown:
            draw_empty(figure.subplots(), "nothing was recorded")
            return
        grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=counts)
        unit, factor = unit_of(longest)
        for axes, (title, spans) in zip(grid[:, 0], shown.items(), strict=True):
            length = f"{factor * _length(spans):.3g} {unit}"
            said = f"{title}: {length}" if title else length
            axes.set_title(shortened(said, 9, width - LANE_NAME_WIDTH))
            _draw_panel(axes, spans, factor, longest, width - LANE_NAME_WIDTH)
        axes.set_xlabel(f"time, {unit}")

    height = 0.5 + 0.3 * sum(counts) + 0.4 * len(shown)
    return Picture(heading, height, draw, note, legend, width)


def _draw_panel(axes: Axes, spans: Sequence[TimeSpan], factor: float, longest: float, width: float) -> None:
    """width: of the longest panel, in inches"""
    begin, rows = min(span.start for span in spans), _lanes_of(spans)
    starts = [factor * (span.start - begin) for span in spans]
    widths = [factor * (span.stop - span.start) for span in spans]
    places = [rows.index(span.lane) for span in spans]
    fills = [PHASE_FILLS.get(span.phase or span.doing, GREY) for span in spans]
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
        range(len(rows)), [shortened(f"rank {rank} {doing}", 9, LANE_NAME_WIDTH) for rank, doing in rows]
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


def merged_intervals(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Return the intervals in order, joined where they overlap or are up to `gap` apart."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


@dataclass(frozen=True)
class ProcessorBar:
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
    doings: Sequence[ProcessorBar]
    said: str = ""


def processor(heading: str, lanes: Sequence[Lane], *, note: str = "") -> Picture:
    """Return a picture of lanes, one below the other, on one scale of cycles."""
    shown = [Lane(lane.name, [*filter(_drawable, lane.doings)], lane.said) for lane in lanes]
    ends = [end for lane in shown for doing in lane.doings for end in (doing.start, doing.stop)]
    seen = {doing.what for lane in shown for doing in lane.doings}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if not ends:
            draw_empty(axes, "nothing ran")
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


def _drawable(doing: ProcessorBar) -> bool:
    ends = doing.start, doing.stop
    return doing.what in FILLS_OF_PROCESSOR and all(math.isfinite(end) and abs(end) <= MOST for end in ends)
