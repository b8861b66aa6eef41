"""Compares results: counts with the baseline exactly, and times with those of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bench.counts import Counts
from bench.results import Info, Results, cause

FALL = 0.2  # of a ratio; a call that takes 1.5 times as long loses a third
IDENTITY = ("op", "shape", "pass", "naive", "world", "dtype", "device", "backend", "flops", "bytes")
NAMED = ("operators", "primitives", "transfers", "launches", "tasks")  # of which each name counts by itself
MOST_NAMES = 6  # of a finding

Kind = Literal["more", "other", "less", "new", "missing", "wrong", "slower", "changed", "broken promise"]
MEANT: tuple[Kind, ...] = ("more", "other", "less", "new", "missing")  # what --update may accept


@dataclass(frozen=True)
class Finding:
    kind: Kind
    case: str
    text: str

    @property
    def fails(self) -> bool:
        return self.kind != "less"


def of_counts(baseline: Mapping[str, Counts], results: Results) -> Iterator[Finding]:
    """What is done more often than before, or instead, or less."""
    yield from of_failures(results)
    for name in baseline.keys() - results.counted.keys() - results.failures.keys():
        yield Finding("missing", name, "it was not counted")
    for name, counts in results.counted.items():
        if (was := baseline.get(name)) is None:
            yield Finding("new", name, "the baseline does not have it")
            continue
        for kind in dict.fromkeys([*was, *counts]):
            yield from _of_kind(name, kind, was.get(kind, {}), counts.get(kind, {}))


def _of_kind(case: str, kind: str, was: Mapping[str, int], now: Mapping[str, int]) -> Iterator[Finding]:
    changes = {name: now.get(name, 0) - was.get(name, 0) for name in {*was, *now}}
    changed = sorted(
        (name for name in changes if changes[name]), key=lambda name: (-abs(changes[name]), name)
    )
    before, after = sum(was.values()), sum(now.values())
    if not changed or (before == after and kind not in NAMED):
        return  # a function has another file, or bytes have another operator
    grown = kind in NAMED and any(change > 0 for change in changes.values())
    told = [f"{name} {changes[name]:+,}" for name in changed[:MOST_NAMES]]
    if len(changed) > MOST_NAMES:
        told.append(f"{len(changed) - MOST_NAMES} more")
    verdict: Kind = "more" if after > before else "other" if grown else "less"
    yield Finding(verdict, case, f"{kind} {before:,} -> {after:,}: {', '.join(told)}")


def of_failures(results: Results) -> Iterator[Finding]:
    for name, failure in results.failures.items():
        yield Finding("wrong", name, cause(failure))


def of_times(before: Results, now: Results) -> Iterator[Finding]:
    """Which ratios fell, by more than the noise of either run; what measures something else or nothing."""
    yield from of_failures(now)
    for name, was in before.infos.items():
        if (info := now.infos.get(name)) is None:
            if name not in now.failures:
                yield Finding("missing", name, f"was {was['ratio']:.2f}x, and did not run")
        elif differences := [key for key in IDENTITY if was.get(key) != info.get(key)]:
            told = ", ".join(f"{key} {was.get(key)} is {info.get(key)} now" for key in differences)
            yield Finding("changed", name, f"measures something else: {told}")
        elif has_fallen(was, info):
            fall = 1 - info["ratio"] / was["ratio"]
            yield Finding("slower", name, f"{was['ratio']:.2f}x is {info['ratio']:.2f}x now: {fall:.0%} less")
    for name, info in now.infos.items():
        promised = info.get("least_ratio")
        if promised is not None and info["ratio_quartile_high"] < promised:  # in three quarters of the rounds
            ratios = f"{info['ratio']:.3f}x; at least {promised:.3f}x is promised"
            yield Finding("broken promise", name, ratios)


def has_fallen(was: Info, now: Info) -> bool:
    """Whether a ratio lost more than FALL, and most rounds are apart."""
    return bool(
        now["ratio"] < (1 - FALL) * was["ratio"] and now["ratio_quartile_high"] < was["ratio_quartile_low"]
    )
