"""Operations per second against operations per byte, under the roof that a GPU's data sheet allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpkernels.pictures.scales import LogScale, log_ticks
from tpkernels.pictures.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    VIOLET,
    Picture,
    legend_width,
    shortened,
    width_of,
)

WIDTH, HEIGHT = 980, 500
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 92, 56
LEAST, MOST = 1e-9, 1e9  # what an axis holds
FILLS = (BLUE, ORANGE, GREEN, VIOLET)


@dataclass(frozen=True)
class Work:
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


def roofline(heading: str, works: Sequence[Work], *, flops: float, bytes: float) -> str:
    """flops, bytes: what the device does in a second at best"""
    shown = [work for work in works if work.is_drawable]
    series = list(dict.fromkeys(work.series for work in works))
    colours = {name: FILLS[i % len(FILLS)] for i, name in enumerate(series)}
    picture = Picture(max(WIDTH, LEFT + legend_width(series)), HEIGHT, heading)
    right = picture.width - RIGHT
    peak = flops / 1e12
    note = f"roof: {peak:,.0f} Tflop/s, {bytes / 1e12:.3g} TB/s"
    fitting = right - 32 - width_of(note, 12)
    picture.text(16, 26, shortened(heading, 16, fitting, bold=True), size=16, bold=True)
    picture.text(right, 26, note, anchor="end", fill=QUIET)
    picture.legend(16, 54, [(colours[name], name) for name in series])
    if left_out := len(works) - len(shown):
        text = f"{left_out:,} of {len(works):,} cannot be drawn"
        picture.text(right, 54, text, anchor="end", fill=QUIET)
    ridge = flops / bytes
    densities = [work.density for work in shown]
    speeds = [work.speed for work in shown]
    x = LogScale(min([*densities, ridge / 4]) / 1.2, max([*densities, ridge * 4]) * 1.2, LEFT, right)
    y = LogScale(min([*speeds, peak / 4]) / 1.2, max([*speeds, peak]) * 1.2, HEIGHT - BOTTOM, TOP)
    for tick in log_ticks(x.low, x.high):
        picture.line(x(tick), TOP, x(tick), HEIGHT - BOTTOM)
        picture.text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:.6g}", anchor="middle", fill=QUIET)
    for tick in log_ticks(y.low, y.high):
        picture.line(LEFT, y(tick), right, y(tick))
        picture.text(LEFT - 8, y(tick) + 4, f"{tick:.6g}", anchor="end", fill=QUIET)
    picture.text((LEFT + right) / 2, HEIGHT - 12, "operations per byte", anchor="middle", fill=QUIET)
    picture.text(LEFT, TOP - 10, "Tflop/s", fill=QUIET)
    start = max(x.low, y.low * 1e12 / bytes)
    roof = [(start, start * bytes), (ridge, flops), (x.high, flops)]
    picture.path_through(((x(work), y(speed / 1e12)) for work, speed in roof), stroke=INK)
    for work in shown:
        floor = max(work.flops / flops, work.bytes / bytes)
        hint = f"{work.name}, {work.series}: {work.speed:.4g} Tflop/s, {floor / work.seconds:.0%} of the roof"
        picture.circle(x(work.density), y(work.speed), 4.5, fill=colours[work.series], hint=hint)
    return picture.to_svg()
