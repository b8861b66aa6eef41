"""Pictures of every kind, ordinary ones and odd ones."""

from __future__ import annotations

import math
import random

from tpkernels.pictures.charts import Bar, bars, curve
from tpkernels.pictures.figure import Picture

NAN, INF = float("nan"), float("inf")
STRANGE = '<b> & "c" \x00\x1b\ud800 ' + "long " * 60
FALLING = [(float(step), 5 * math.exp(-step / 40) + 2) for step in range(1, 151)]


def ratios(count: int) -> list[Bar]:
    draw = random.Random(0)
    found = [math.exp(draw.gauss(0, 0.3)) for _ in range(count)]
    names = [f"llama3-70b-tp8-8192-fc_down-forward-swiglu-{number}" for number in range(count)]
    return [Bar(name, ratio, ratio * 0.95, ratio * 1.05) for name, ratio in zip(names, found, strict=True)]


def losses(points: list[tuple[float, float]], heading: str = "Loss", across: str = "step") -> Picture:
    return curve(heading, points, across=across, along="loss, nats per token")


EXTREME = [
    Bar("z", 1.7e308),
    Bar("y", 5e-324),
    Bar("x", 1e8, 5e-324, 1e308),
    Bar("a", 0.2, 0.1, 0.25),
    Bar("c", 1e-7),
    Bar("d", 1e5, NAN, INF),
    Bar("e", 1.0),
]
SAMPLES = {
    "curve": losses(FALLING),
    "curve_of_nothing": losses([(1, NAN), (2, INF)]),
    "curve_of_equals": losses([(1, 2.0), (2, 2.0)]),
    "curve_of_large": losses([(1, 1e8), (2, 1e8 + 1), (3_000_000, 1e8 - 1)]),
    "curve_of_monsters": losses([(1, 1e308), (2, -1e308), (3, 1e30), (4, -1e30)]),
    "curve_strange": losses([(0, NAN), *FALLING], STRANGE, STRANGE),
    "bars": bars("Ratios", ratios(40), note="medians"),
    "bars_one": bars("Ratio", [Bar("shape", 1.3, 1.2, 1.4)]),
    "bars_extreme": bars("Ratios", EXTREME),
    "bars_of_no_numbers": bars("Ratios", [Bar("a", NAN), Bar("b", INF), Bar("c", 0.0), Bar("d", -2.0)]),
    "bars_strange": bars(STRANGE, [Bar(STRANGE, 1.1, 1.0, 1.2)], note=STRANGE, across=STRANGE),
}
