"""A value by step, as a line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tpkernels.pictures.scales import Scale, labels, round_ticks
from tpkernels.pictures.svg import BLUE, QUIET, Picture, shortened, width_of

WIDTH, HEIGHT = 760, 320
RIGHT, TOP, BOTTOM = 76, 46, 44
COLUMNS = 1000  # of more points than this only the lowest and the highest of a column are drawn

MOST = 1e30  # of a value: an axis has to be a finite one

Points = Sequence[tuple[float, float]]


def curve(heading: str, points: Points, *, across: str) -> str:
    """points: (x, y) by rising x; a y that is no number, or too large, is left out and counted
    across: what x is
    """
    shown = [(x, y) for x, y in points if math.isfinite(x) and abs(y) <= MOST]
    picture = Picture(WIDTH, HEIGHT, heading)
    left_out = len(points) - len(shown)
    note = f"{left_out:,} of {len(points):,} cannot be drawn" * bool(left_out)
    fitting = WIDTH - 48 - width_of(note, 12)
    picture.text(16, 24, shortened(heading, 15, fitting, bold=True), size=15, bold=True)
    if note:
        picture.text(WIDTH - 16, 24, note, anchor="end", fill=QUIET)
    if not shown:
        picture.text(WIDTH / 2, HEIGHT / 2, "nothing to draw", anchor="middle", fill=QUIET)
        return picture.to_svg()
    values = [y for _, y in shown]
    ticks = round_ticks(min(values), max(values))
    written = labels(ticks)
    left = max(40, 24 + max(width_of(label, 12) for label in written))
    first, last = shown[0][0], shown[-1][0]
    x = Scale(first, max(last, first + 1), left, WIDTH - RIGHT)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    for tick, label in zip(ticks, written, strict=True):
        picture.line(left, y(tick), WIDTH - RIGHT, y(tick))
        picture.text(left - 8, y(tick) + 4, label, anchor="end")
    for step in _steps(first, last):
        picture.text(x(step), HEIGHT - BOTTOM + 18, f"{step:,.0f}", anchor="middle")
    middle = (left + WIDTH - RIGHT) / 2
    picture.text(middle, HEIGHT - 8, shortened(across, 12, WIDTH / 2), anchor="middle", fill=QUIET)
    picture.path_through((x(step), y(value)) for step, value in _thinned(shown))
    end, value = shown[-1]
    picture.circle(x(end), y(value), 4, fill=BLUE)
    picture.text(x(end) + 8, y(value) + 4, f"{value:.4g}", bold=True)
    return picture.to_svg()


def _steps(first: float, last: float) -> list[float]:
    """The two ends, and round numbers well between them."""
    apart = (last - first) / 12
    inner = [tick for tick in round_ticks(first, last) if first + apart < tick < last - apart]
    return sorted({first, *(tick for tick in inner if tick == int(tick)), last})


def _thinned(points: Points) -> Iterator[tuple[float, float]]:
    size = -(-len(points) // COLUMNS)
    for start in range(0, len(points), size):
        column = points[start : start + size]
        ends = {min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
        yield from sorted(ends)
