"""Pictures of every kind, ordinary ones and odd ones."""

from __future__ import annotations

import math
import random
import sys

from tpkernels.groups.plan import plan_groups
from tpkernels.pictures.charts import (
    Bar,
    Lane,
    ProcessorBar,
    TimedWork,
    TimeSpan,
    bars,
    curve,
    lanes,
    processor,
    roofline,
)
from tpkernels.pictures.figure import Picture, sheet

NAN, INF = float("nan"), float("inf")
STRANGE = '<b> & "c" \x00\x1b\ud800 ' + "long " * 60

FALLING = [(float(step), 5 * math.exp(-step / 40) + 2) for step in range(1, 151)]
STEP = [
    TimeSpan(rank, doing, "", start, start + 0.1, phase)
    for rank in (0, 1)
    for doing, phase, start in (
        ("computes", "forward", 0.0),
        ("computes", "backward", 0.12),
        ("transfers", "", 0.09),
        ("computes", "optimizer", 0.25),
    )
]
CALLS = [
    TimeSpan(0, "computes", "own rows", 5.0, 5.3),
    TimeSpan(0, "receives", "piece 1", 5.1, 5.2),
    TimeSpan(0, "receives", "piece <2>", 5.2, 5.21),
    TimeSpan(1, "computes", "all rows", 5.05, 5.4),
]
LATER = [TimeSpan(0, "computes", "all rows", 9.0, 9.2)]
ENGINES = [
    Lane(
        "tensor cores", [ProcessorBar("products", 100.0 * i, 100.0 * i + 80) for i in range(10)], "80 % busy"
    ),
    Lane("copies", [ProcessorBar("copies", 0.0, 900.0)]),
    Lane(
        "warps 0-3",
        [ProcessorBar("waits", 0.0, 1000.0), ProcessorBar("epilogue", 1000.0, 1400.0)],
        "29 % at work",
    ),
]


def ratios(count: int) -> list[Bar]:
    draw = random.Random(0)
    found = [math.exp(draw.gauss(0, 0.3)) for _ in range(count)]
    names = [f"llama3-70b-tp8-8192-fc_down-forward-swiglu-{number}" for number in range(count)]
    return [Bar(name, ratio, ratio * 0.95, ratio * 1.05) for name, ratio in zip(names, found, strict=True)]


def works(count: int) -> list[TimedWork]:
    draw = random.Random(0)
    densities = [10 ** draw.uniform(0, 4) for _ in range(count)]
    return [
        TimedWork(f"shape {number}", series, density * 1e9, 1e9, max(density / 989e3, 1 / 3.35e3) * slower)
        for number, density in enumerate(densities)
        for series, slower in (("ours", 1.2), ("naive", 1.5))
    ]


def has_loaded_matplotlib() -> bool:
    return any(name.split(".")[0] == "matplotlib" for name in sys.modules)


def losses(heading: str, points: list[tuple[float, float]], across: str = "step") -> Picture:
    return curve(heading, points, across=across, along="loss, nats per token")


def hopper(heading: str, shown: list[TimedWork]) -> Picture:
    return roofline(heading, shown, flops=989e12, bytes=3.35e12)


CURVES = {
    "curve": FALLING,
    "curve_of_nothing": [(1, NAN), (2, INF)],
    "curve_of_equals": [(1, 2.0), (2, 2.0)],
    "curve_of_large": [(1, 1e8), (2, 1e8 + 1), (3_000_000, 1e8 - 1)],
    "curve_of_monsters": [(1, 1e308), (2, -1e308), (3, 1e30), (4, -1e30)],
}
SAMPLES = {
    **{name: losses("Loss", points) for name, points in CURVES.items()},
    "curve_strange": losses(STRANGE, [(0, NAN), *FALLING], STRANGE),
    "lanes": lanes("One step", {"step 3": STEP}, note="two ranks"),
    "lanes_of_panels": lanes("Calls", {"at once": CALLS, "half as long": LATER}),
    "lanes_narrow": lanes("Calls", {"at once": CALLS}, width=5.0),
    "lanes_of_nothing": lanes("Nothing", {"empty": []}),
    "lanes_of_an_instant": lanes("Instant", {"": [TimeSpan(123, "transfers", "x", 7.0, 7.0)]}),
    "lanes_strange": lanes(
        STRANGE, {STRANGE: CALLS, "": [TimeSpan(0, STRANGE, STRANGE, 1e300, 2e300)]}, note=STRANGE
    ),
    "bars": bars("Ratios", ratios(40), note="medians"),
    "bars_one": bars("Ratio", [Bar("shape", 1.3, 1.2, 1.4)]),
    "bars_extreme": bars(
        "Ratios",
        [
            Bar("z", 1.7e308),
            Bar("y", 5e-324),
            Bar("x", 1e8, 5e-324, 1e308),
            Bar("a", 0.2, 0.1, 0.25),
            Bar("b", 8, 7, 9),
            Bar("c", 1e-7),
            Bar("d", 1e5, NAN, INF),
            Bar("e", 1.0),
        ],
    ),
    "bars_of_no_numbers": bars("Ratios", [Bar("a", NAN), Bar("b", INF), Bar("c", 0.0), Bar("d", -2.0)]),
    "bars_strange": bars(STRANGE, [Bar(STRANGE, 1.1, 1.0, 1.2)], note=STRANGE, across=STRANGE),
    "processor": processor("A tile", ENGINES, note="model"),
    "processor_of_nothing": processor("A tile", []),
    "processor_strange": processor(
        STRANGE,
        [
            Lane(
                STRANGE,
                [
                    ProcessorBar(STRANGE, 0.0, 1.0),
                    ProcessorBar("waits", NAN, INF),
                    ProcessorBar("waits", 0.0, 1e14),
                ],
                STRANGE,
            )
        ],
        note=STRANGE,
    ),
    "plan": sheet(plan_groups(world_size=16, tensor=2, pipeline=4).to_svg()),
    "roofline": hopper("H100", works(40)),
    "roofline_of_nothing": hopper("H100", []),
    "roofline_odd": hopper(
        STRANGE,
        [
            TimedWork("c", "ours", 1e308, 1e-308, 1e-308),
            TimedWork("d", "x", 1, 1, 1e300),
            TimedWork("a", "ours", 1e9, 1e12, 5.0),
            TimedWork("b", "ours", 1e9, 0.0, 1.0),
        ],
    ),
}
