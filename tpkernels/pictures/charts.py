"""Charts: a value by step as a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpkernels.pictures.figure import BLUE, WIDTH, Picture, draw_empty, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HUGE = 1e30  # of a curve's values


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
