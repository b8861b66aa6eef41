"""What ran when: a lane for each rank and what it was doing, on one scale of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpkernels.pictures.scales import round_step
from tpkernels.pictures.svg import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    VIOLET,
    Picture,
    legend_width,
    shortened,
    width_of,
)

WIDTH, RIGHT = 980, 28
LABEL_WIDTH = 240  # at most
LANE, GAP, TITLE = 26, 8, 36  # heights: a lane, the space below it, the head of a panel
FILLS = {
    "computes": BLUE,
    "receives": ORANGE,
    "transfers": ORANGE,
    "forward": BLUE,
    "backward": VIOLET,
    "optimizer": GREEN,
}


@dataclass(frozen=True)
class Span:
    """Something that lasted, in seconds of a clock that all ranks share."""

    rank: int
    doing: str  # what its lane is for
    name: str  # may be empty
    start: float
    stop: float
    phase: str = ""  # what its colour says, where lanes do not say it

    @property
    def lane(self) -> tuple[int, str]:
        return self.rank, self.doing


def lanes(heading: str, panels: Mapping[str, Sequence[Span]], *, note: str = "") -> str:
    """Panels one below the other, each from its own first moment on.

    note: a line below the heading
    """
    panels = {title: spans for title, spans in panels.items() if spans}
    phases = [phase for phase in FILLS if any(phase == s.phase for spans in panels.values() for s in spans)]
    top = 30 + 20 * bool(note) + 24 * bool(phases)
    names = [_lane_name(lane) for spans in panels.values() for lane in _lanes_of(spans)]
    left = 32 + max((width_of(name, 13) for name in names), default=0)
    height = top + sum(TITLE + 12 + len(_lanes_of(spans)) * (LANE + GAP) for spans in panels.values()) + 32
    picture = Picture(max(WIDTH, 16 + legend_width(phases)), height, heading)
    fitting = picture.width - 16 - RIGHT
    picture.text(16, 26, shortened(heading, 16, fitting, bold=True), size=16, bold=True)
    if note:
        picture.text(16, 46, shortened(note, 12, fitting), fill=QUIET)
    picture.legend(16, top - 2, [(FILLS[phase], phase) for phase in phases])
    if not panels:
        picture.text(16, height - 16, "nothing was recorded", fill=QUIET)
        return picture.to_svg()
    longest = max(_length(spans) for spans in panels.values()) or 1e-9
    unit, factor = _unit(longest)
    scale = (picture.width - left - RIGHT) / longest
    y: float = top
    for title, spans in panels.items():
        length = f"{factor * _length(spans):.3g} {unit}"
        said = shortened(f"{title}: {length}" if title else length, 13, fitting - left, bold=True)
        picture.text(left, y + 22, said, size=13, bold=True)
        y += TITLE
        y = _draw_panel(picture, spans, left, y, scale, longest) + 12
    _draw_axis(picture, left, y + 10, scale, longest)
    return picture.to_svg()


def _draw_panel(
    picture: Picture, spans: Sequence[Span], left: float, y: float, scale: float, longest: float
) -> float:
    begin, rows = min(span.start for span in spans), _lanes_of(spans)
    top, bottom = y, y + len(rows) * (LANE + GAP)
    for tick in _ticks(longest):
        picture.line(left + scale * tick, top - 4, left + scale * tick, bottom)
    for row in rows:
        picture.text(left - 12, y + LANE / 2 + 5, _lane_name(row), size=13, anchor="end")
        for span in (span for span in spans if span.lane == row):
            start, stop = left + scale * (span.start - begin), left + scale * (span.stop - begin)
            _draw_span(picture, span, start, y, max(stop - start, 0.5))
        y += LANE + GAP
    end = left + scale * _length(spans)
    picture.line(end, top - 8, end, bottom, stroke=INK, width=1.5)
    return bottom


def _draw_span(picture: Picture, span: Span, x: float, y: float, width: float) -> None:
    gap = 1 if width > 4 else 0  # between two that touch
    radius = 3 if width > 8 else 0
    unit, factor = _unit(span.stop - span.start)
    hint = f"{span.name or span.phase or span.doing}: {factor * (span.stop - span.start):.3g} {unit}"
    fill = FILLS.get(span.phase or span.doing, GREY)
    picture.rect(x, y, width - gap, LANE, fill=fill, radius=radius, hint=hint)
    short = span.name.rpartition(" ")[2]  # of "piece 3" the number
    label = next((name for name in (span.name, short) if width > width_of(name, 12) + 6), "")
    if label:
        picture.text(x + width / 2, y + LANE / 2 + 4, label, anchor="middle", fill=PAPER)


def _draw_axis(picture: Picture, left: float, y: float, scale: float, longest: float) -> None:
    unit, factor = _unit(longest)
    for tick in _ticks(longest):
        picture.text(left + scale * tick, y, f"{factor * tick:.6g}", anchor="middle", fill=QUIET)
    picture.text(left - 12, y, unit, anchor="end", fill=QUIET)


def _ticks(longest: float) -> list[float]:
    step = round_step(longest, 9)
    return [number * step for number in range(math.floor(longest / step + 1e-9) + 1)]


def _lanes_of(spans: Sequence[Span]) -> list[tuple[int, str]]:
    return sorted({span.lane for span in spans})


def _lane_name(lane: tuple[int, str]) -> str:
    return shortened(f"rank {lane[0]} {lane[1]}", 13, LABEL_WIDTH)


def _length(spans: Sequence[Span]) -> float:
    return max(span.stop for span in spans) - min(span.start for span in spans)


def _unit(seconds: float) -> tuple[str, float]:
    """The unit to write about so many seconds in, and how many there are to a second."""
    for name, size in (("s", 1.0), ("ms", 1e3)):
        if seconds * size >= 1:
            return name, size
    return "us", 1e6
