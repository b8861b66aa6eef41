"""Results as lines of text, by op and shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bench.results import duration


def summary(infos: Sequence[dict[str, Any]]) -> Iterator[str]:
    """infos: the results of each case, in the order in which they ran"""

    def heading(info: dict[str, Any]) -> tuple[str, str]:
        return info["op"], info["shape"]

    for (op, shape), group in groupby(sorted(infos, key=heading), heading):
        yield f"{op} {shape}"
        yield from (f"  {_line(info)}" for info in group)


def _line(info: dict[str, Any]) -> str:
    spread = f"{info['ratio_quartile_low']:.2f} to {info['ratio_quartile_high']:.2f}"
    times = f"{duration(info['ours_ms'])} against {duration(info['naive_ms'])} of {info['naive']}"
    others = "".join(
        f", {value:.2f}x {key.removeprefix('ratio_to_')}"
        for key, value in info.items()
        if key.startswith("ratio_to_")
    )
    return f"{info['pass']:<17} {info['ratio']:6.2f}x ({spread})  {times}{others}"
