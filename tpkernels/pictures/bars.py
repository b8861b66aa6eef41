"""Ratios as bars from 1.0: to the right what is faster, to the left what is slower, with their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpkernels.pictures.scales import LogScale, log_ticks
from tpkernels.pictures.svg import BLUE, GREY, INK, ORANGE, QUIET, Picture, shortened, width_of

WIDTH, MARGIN, ROW, BAR = 980, 16, 22, 12
LEAST, MOST = 1e-9, 1e9  # what an axis holds; anything else is written and not drawn
LABEL_WIDTH = 480  # at most
WIN, LOSS, EVEN = "faster", "slower", "within the spread"
FILLS = {WIN: BLUE, LOSS: ORANGE, EVEN: GREY}


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


def bars(heading: str, rows: Sequence[Bar], *, note: str = "", across: str = "times as fast") -> str:
    """A row for each ratio, from the first down, on a logarithmic axis: twice and half are equally long."""
    drawable = [row for row in rows if row.is_drawable]
    ends = [end for row in drawable for end in row.spread]
    low, high = min([*ends, 0.9]) / 1.05, max([*ends, 1.1]) * 1.05
    ticks = log_ticks(low, high)
    top = 66 + 20 * bool(note)
    bottom = top + ROW * len(rows)
    picture = Picture(WIDTH, bottom + 44, heading)
    picture.text(MARGIN, 26, shortened(heading, 16, WIDTH - 2 * MARGIN, bold=True), size=16, bold=True)
    if note:
        picture.text(MARGIN, 46, shortened(note, 12, WIDTH - 2 * MARGIN), fill=QUIET)
    verdicts = [row.verdict for row in drawable]
    counted = [(fill, f"{verdicts.count(verdict)} {verdict}") for verdict, fill in FILLS.items()]
    picture.legend(MARGIN, top - 20, counted)
    left = MARGIN + min(LABEL_WIDTH, max((width_of(row.name, 12) for row in rows), default=0)) + 12
    x = LogScale(low, high, left, WIDTH - MARGIN - 68)
    for tick in ticks:
        picture.line(x(tick), top, x(tick), bottom)
        picture.text(x(tick), bottom + 16, f"{tick:.4g}", anchor="middle", fill=QUIET)
    for number, row in enumerate(rows):
        _draw_row(picture, row, x, top + ROW * number, left)
    picture.line(x(1), top - 4, x(1), bottom + 2, stroke=INK, width=1.5)
    said = shortened(across, 12, x.stop - x.start)
    picture.text((x.start + x.stop) / 2, bottom + 34, said, anchor="middle", fill=QUIET)
    return picture.to_svg()


def _draw_row(picture: Picture, row: Bar, x: LogScale, y: float, left: float) -> None:
    middle, base = y + ROW / 2, y + ROW / 2 + 4
    picture.text(left - 10, base, shortened(row.name, 12, left - 10 - MARGIN), anchor="end")
    if not row.is_drawable:
        text = "no number" if math.isnan(row.ratio) else f"{row.ratio:.3g}"
        picture.text(WIDTH - MARGIN, base, text, anchor="end", fill=QUIET)
        return
    low, high = row.spread
    start, stop = sorted((x(1), x(row.ratio)))
    hint = f"{row.name}: {row.ratio:.4g}, spread {low:.4g} to {high:.4g}"
    picture.rect(start, middle - BAR / 2, max(stop - start, 1), BAR, fill=FILLS[row.verdict], hint=hint)
    if low < high:
        picture.line(x(low), middle, x(high), middle, stroke=INK, width=1.5)
        for end in (low, high):
            picture.line(x(end), middle - 4, x(end), middle + 4, stroke=INK, width=1.5)
    number = f"{row.ratio:.2f}" if 0.1 <= row.ratio < 1000 else f"{row.ratio:.3g}"
    picture.text(WIDTH - MARGIN, base, number, anchor="end", bold=row.verdict != EVEN)
