"""What `python -m bench run` leaves: the results of cases, and what became of those without one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.counts import Counts
from tpkernels.files import parsed

Info = dict[str, Any]  # what is said of a case: docs/benchmarks.md
NEEDED = ("op", "shape", "pass", "naive", "ours_ms", "naive_ms", "device", "versions", "rounds")
RATIOS = ("ratio", "ratio_quartile_low", "ratio_quartile_high")


class BadFile(ValueError):
    """A file that is not what it should be: what was expected, what was got, what to do."""


@dataclass(frozen=True)
class Results:
    """Of one run, by the names of cases."""

    infos: Mapping[str, Info]
    failures: Mapping[str, str]  # why a case has no result
    command: str
    counted: Mapping[str, Counts] = field(default_factory=dict)  # what ours does, where it was counted

    @property
    def device(self) -> str:
        """The GPU, if one was used; cases of ranks are timed on that machine's CPU."""
        devices = {info["device"] for info in self.infos.values()}
        return min(devices - {"cpu"}, default="cpu")


def read_json(path: Path, made_by: str) -> Any:
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}; `{made_by}` makes it") from error
    except ValueError as error:
        raise BadFile(f"{path}: expected JSON, got {error}; make it anew by `{made_by}`") from error


def read(path: Path) -> Results:
    made_by = f"python -m bench run -o {path}"
    report = read_json(path, made_by)
    try:
        infos = {case["fullname"]: case["extra_info"] for case in report["benchmarks"]}
        outcomes = report.get("outcomes", {})
        failures, counted = outcomes.get("failures", {}), outcomes.get("counted", {})
        results = Results(infos, failures, report.get("command", "pytest bench"), counted)
        for info in infos.values():
            assert all(info[key] is not None for key in NEEDED)
            assert all(0 < info[key] < math.inf for key in RATIOS)
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        raise BadFile(f"{path}: expected results of benchmarks; make them by `{made_by}`") from error
    return results


def for_github_action(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Return what github-action-benchmark reads, by its names of tools."""
    ratios = [
        {
            "name": name,
            "unit": f"times as fast as {info['naive']}",
            "value": info["ratio"],
            "range": f"{info['ratio_quartile_low']:.2f} to {info['ratio_quartile_high']:.2f}",
            "extra": f"{duration(info['ours_ms'])} against {duration(info['naive_ms'])}, {info['device']}",
        }
        for name, info in results.infos.items()
    ]
    counts = [
        {
            "name": f"{name}: {kind}",
            "unit": kind,
            "value": sum(named.values()),
            "extra": "\n".join(f"{of}: {count}" for of, count in named.items()),
        }
        for name, kinds in results.counted.items()
        for kind, named in kinds.items()
    ]
    return {"customBiggerIsBetter": ratios, "customSmallerIsBetter": counts}


def duration(milliseconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> duration(0.01849), duration(4.5175), duration(1234.5)
    ('18.5 µs', '4.52 ms', '1.23 s')
    """
    for unit, factor in (("s", 1e-3), ("ms", 1.0)):
        if milliseconds * factor >= 1:
            return f"{milliseconds * factor:.3g} {unit}"
    return f"{1e3 * milliseconds:.3g} µs"


def cause(failure: str) -> str:
    """The line of pytest's report that says what was wrong."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    told = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (told or lines or ["nothing was said"])[0]


def slug(device: str) -> str:
    """The name of a device as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
