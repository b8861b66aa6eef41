"""Pictures of every kind, ordinary ones and odd ones."""

from __future__ import annotations

import math

from tpkernels.pictures.charts import curve
from tpkernels.pictures.figure import Picture

NAN, INF = float("nan"), float("inf")
STRANGE = '<b> & "c" \x00\x1b\ud800 ' + "long " * 60
FALLING = [(float(step), 5 * math.exp(-step / 40) + 2) for step in range(1, 151)]


def losses(points: list[tuple[float, float]], heading: str = "Loss", across: str = "step") -> Picture:
    return curve(heading, points, across=across, along="loss, nats per token")


SAMPLES = {
    "curve": losses(FALLING),
    "curve_of_nothing": losses([(1, NAN), (2, INF)]),
    "curve_of_equals": losses([(1, 2.0), (2, 2.0)]),
    "curve_of_large": losses([(1, 1e8), (2, 1e8 + 1), (3_000_000, 1e8 - 1)]),
    "curve_of_monsters": losses([(1, 1e308), (2, -1e308), (3, 1e30), (4, -1e30)]),
    "curve_strange": losses([(0, NAN), *FALLING], STRANGE, STRANGE),
}
