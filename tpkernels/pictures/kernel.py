"""One processor of a GPU at work on a tile: what its engines and its warps did when, in cycles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpkernels.pictures.figure import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    QUIET,
    VIOLET,
    Picture,
    hint,
    nothing,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME_WIDTH, SAID_WIDTH = 1.9, 1.9  # inches, of what is written left and right of a lane at most
BAR = 0.72  # of a lane's height
MOST = 1e15  # cycles; what lies beyond is left out
PALE = "#c5ddcd"
FILLS = {  # in the order of drawing: waits lie over the epilogue that they are in
    "products": BLUE,
    "copies": ORANGE,
    "stores": VIOLET,
    "instructions": PALE,
    "epilogue": GREEN,
    "waits": GREY,
}


@dataclass(frozen=True)
class Doing:
    """A bar in a lane, from one cycle to another; `what` is a name of FILLS."""

    what: str
    start: float
    stop: float


@dataclass(frozen=True)
class Lane:
    """An engine, or warps that do the same.

    said: what is written beside it, such as a share of the time
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
        axes.set_yticks(range(len(shown)), [shortened(lane.name, 9, NAME_WIDTH) for lane in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(first, max(last, first + 1))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("cycles")

    legend = [(fill, what) for what, fill in FILLS.items() if what in seen]
    return Picture(heading, 0.7 + 0.3 * len(shown), draw, note, legend)


def _draw_lane(axes: Axes, place: int, lane: Lane) -> None:
    length = max((doing.stop for doing in lane.doings), default=0.0) - min(
        (doing.start for doing in lane.doings), default=0.0
    )
    for what, fill in FILLS.items():
        its = [(doing.start, doing.stop - doing.start) for doing in lane.doings if doing.what == what]
        if its:
            bars = axes.broken_barh(its, (place - BAR / 2, BAR), facecolors=fill, linewidth=0)
            cycles = sum(width for _, width in its)
            hint(bars, f"{lane.name}, {what}: {cycles:,.0f} cycles of {length:,.0f}")
    words = axes.text(1.01, place, shortened(lane.said, 8, SAID_WIDTH), va="center", size=8, color=QUIET)
    words.set(transform=axes.get_yaxis_transform())


def _drawable(doing: Doing) -> bool:
    ends = doing.start, doing.stop
    return doing.what in FILLS and all(math.isfinite(end) and abs(end) <= MOST for end in ends)
