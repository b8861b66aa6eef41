"""Compares results with a baseline: what fell, and by how much; what is missing, wrong, new or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from bench.baseline import IDENTITY, Baseline
from bench.results import Info, Results, cause

SLOWED = 1.5  # times as long: what every case must show
MOST = 0.2  # a ratio that fell by more fell, however noisy it is: SLOWED takes a third of it

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
        tolerance = tolerated(was, info, baseline.floor)
        if (fall := fallen(was, info["ratio"])) > tolerance:
            ratios = f"{was['ratio']:.2f}x is {info['ratio']:.2f}x now"
            yield Finding("fell", name, f"{ratios}: {fall:.0%} less, tolerance {tolerance:.0%}")
    if promised is not None and info["ratio_quartile_high"] < promised:  # in three quarters of the rounds
        yield Finding("broken promise", name, f"{info['ratio']:.3f}x; at least {promised:.3f}x is promised")


def fallen(was: Info, ratio: float) -> float:
    """The part of a ratio that is gone."""
    return float(1 - ratio / was["ratio"])


def suspects(baseline: Baseline, results: Results) -> list[str]:
    """Names of cases to time again: a noisy one already if half of what is tolerated at most is gone."""
    found = {finding.case for finding in findings(baseline, results) if finding.kind in REPEATED}
    for name, info in results.infos.items():
        if (was := baseline.cases.get(name)) and fallen(was, info["ratio"]) > MOST / 2:
            found.add(name)
    return sorted(found)


def hides_a_slowdown(was: Info, now: Info, floor: float) -> bool:
    """Whether a case that took SLOWED times as long as now would not have fallen."""
    return fallen(was, now["ratio"] / SLOWED) <= tolerated(was, now, floor)


def tolerated(was: Info, now: Info, floor: float) -> float:
    """By what part a ratio may fall without having fallen."""
    return min(MOST, max(floor, uncertainty(was) + uncertainty(now)))


def uncertainty(info: Info) -> float:
    """Of a ratio, in parts of it: how far off the median of rounds is likely to be, or a run has been."""
    ratio, runs = info["ratio"], info.get("ratio_of_runs", [info["ratio"]])
    # of n normally distributed rounds the median's standard deviation is 0.93 interquartile ranges / sqrt(n)
    of_rounds = 1.5 * (info["ratio_quartile_high"] - info["ratio_quartile_low"]) / sqrt(info["rounds"])
    return float(max(of_rounds, max(abs(run - ratio) for run in runs)) / ratio)
