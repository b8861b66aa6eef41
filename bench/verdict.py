"""Compares results with a baseline: what fell, and by how much; what is missing, wrong, new or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from bench.baseline import IDENTITY, Baseline
from bench.results import Info, Results, cause

MOST = 0.5  # a ratio that halved fell, however noisy it is

Kind = Literal["fell", "broken promise", "missing", "wrong", "changed", "new"]
REPEATED: tuple[Kind, ...] = ("fell", "broken promise")  # what may be noise


@dataclass(frozen=True)
class Finding:
    kind: Kind
    case: str
    text: str

    @property
    def fails(self) -> bool:
        return self.kind != "new"


def findings(baseline: Baseline, results: Results) -> Iterator[Finding]:
    for name, was in baseline.cases.items():
        if name not in results.infos and name not in results.failures:
            yield Finding("missing", name, f"was {was['ratio']:.2f}x, and did not run")
    for name, failure in results.failures.items():
        yield Finding("wrong", name, cause(failure))
    for name, info in results.infos.items():
        yield from _of_case(name, info, baseline)


def _of_case(name: str, info: Info, baseline: Baseline) -> Iterator[Finding]:
    was = baseline.cases.get(name)
    promised = info.get("least_ratio")
    if was is None:
        yield Finding("new", name, f"{info['ratio']:.2f}x, not in the baseline yet")
    elif differences := [key for key in IDENTITY if was[key] != info[key]]:
        told = ", ".join(f"{key} {was[key]} is {info[key]} now" for key in differences)
        yield Finding("changed", name, f"measures something else: {told}")
    else:
        fall = 1 - info["ratio"] / was["ratio"]
        tolerance = tolerated(was, info, baseline.floor)
        if fall > tolerance:
            ratios = f"{was['ratio']:.2f}x is {info['ratio']:.2f}x now"
            yield Finding("fell", name, f"{ratios}: {fall:.0%} less, tolerance {tolerance:.0%}")
    if promised is not None and info["ratio_quartile_high"] < promised:  # in three quarters of the rounds
        yield Finding("broken promise", name, f"{info['ratio']:.3f}x; at least {promised:.3f}x is promised")


def tolerated(was: Info, now: Info, floor: float) -> float:
    """By what part a ratio may fall without having fallen."""
    return min(MOST, max(floor, uncertainty(was) + uncertainty(now)))


def uncertainty(info: Info) -> float:
    """Of a ratio, in parts of it: how far off the median of rounds is likely to be, or a run has been."""
    ratio, runs = info["ratio"], info.get("ratio_of_runs", [info["ratio"]])
    # of n normally distributed rounds the median's standard deviation is 0.93 interquartile ranges / sqrt(n)
    of_rounds = 1.5 * (info["ratio_quartile_high"] - info["ratio_quartile_low"]) / sqrt(info["rounds"])
    return float(max(of_rounds, max(abs(run - ratio) for run in runs)) / ratio)
