"""What files of results say, with whatever of it is missing: of benchmarks, of overlap, of time lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpkernels.files import parsed
from tpkernels.pictures.charts import Bar, TimeSpan

Object = Mapping[str, Any]
_LANE = re.compile(r"rank (\d{1,9}) (.+)")  # as `timeline.chrome_trace` names its threads


class Unreadable(ValueError):
    """A file that holds no results: what was expected, what was got."""


@dataclass(frozen=True)
class Case:
    """One benchmark; `docs/benchmarks.md` explains the keys of `info`."""

    name: str
    info: Object

    def number(self, key: str) -> float:
        """NaN where there is none."""
        return _number(self.info.get(key))

    def word(self, key: str) -> str:
        value = self.info.get(key)
        return "" if value is None else str(value)

    @property
    def op(self) -> str:
        return self.word("op") or self.name.partition("::")[2].partition("[")[0] or self.name

    @property
    def label(self) -> str:
        """What tells it from other cases of its op."""
        words = f"{self.word('shape')} {self.word('pass')}".strip()
        return words or self.name.partition("[")[2].removesuffix("]") or self.name

    @property
    def bar(self) -> Bar:
        low, high = self.number("ratio_quartile_low"), self.number("ratio_quartile_high")
        return Bar(self.label, self.number("ratio"), low, high)


@dataclass(frozen=True)
class Run:
    """The benchmarks of one file."""

    path: Path
    cases: Sequence[Case]
    failures: Mapping[str, str]
    facts: Mapping[str, str]  # what they ran on

    @property
    def compared(self) -> list[Case]:
        """Those that have a ratio, which may be no number."""
        return [case for case in self.cases if case.info.get("ratio") is not None]


@dataclass(frozen=True)
class Overlaps:
    """What `python -m bench.cases.overlap` timed."""

    path: Path
    results: Sequence[Object]


@dataclass(frozen=True)
class TimeLine:
    """What `bench/cases/linear_timeline.py` recorded."""

    path: Path
    panels: Mapping[str, Sequence[TimeSpan]]


def read(path: Path) -> Run | Overlaps | TimeLine:
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise Unreadable(f"{path}: expected JSON, got {error}") from error
    if isinstance(found, dict) and _are_objects(found.get("benchmarks")):
        return _run(path, found)
    if isinstance(found, dict) and _are_objects(found.get("traceEvents")):
        return TimeLine(path, _panels(path, found["traceEvents"]))
    if _are_objects(found) and found and all("link" in result for result in found):
        return Overlaps(path, found)
    raise Unreadable(
        f"{path}: expected the JSON of benchmarks (`python -m bench run`, `pytest bench --benchmark-json`), "
        "of `python -m bench.cases.overlap`, or a time line of `python -m bench.cases.linear_timeline`"
    )


def _run(path: Path, found: Object) -> Run:
    cases = [
        Case(str(one.get("fullname") or one.get("name") or "unnamed"), as_object(one.get("extra_info")))
        for one in found["benchmarks"]
    ]
    outcomes = as_object(found.get("outcomes"))
    failures = {str(name): str(why) for name, why in as_object(outcomes.get("failures")).items()}
    return Run(path, cases, failures, _facts(found, cases))


def _facts(found: Object, cases: Sequence[Case]) -> dict[str, str]:
    keys = ("device", "backend", "dtype", "world", "revision")
    facts = {key: _distinct(case.info.get(key) for case in cases) for key in keys}
    versions = [as_object(case.info.get("versions")) for case in cases]
    for name in dict.fromkeys(name for known in versions for name in known):
        facts[str(name)] = _distinct(known.get(name) for known in versions)
    machine = as_object(found.get("machine_info"))
    facts["processor"] = _distinct([as_object(machine.get("cpu")).get("brand_raw")])
    facts["when"] = _distinct([found.get("datetime")]).partition(".")[0]
    facts["command"] = _distinct([found.get("command")])
    return {name: value for name, value in facts.items() if value}


def _panels(path: Path, events: Sequence[Object]) -> dict[str, list[TimeSpan]]:
    """Seconds from the start of each panel; its threads are lanes."""
    titles: dict[str, str] = {}
    lanes: dict[tuple[str, str], tuple[int, str]] = {}
    panels: dict[str, list[TimeSpan]] = {}
    for event in events:
        panel, lane = str(event.get("pid")), (str(event.get("pid")), str(event.get("tid")))
        name = str(as_object(event.get("args")).get("name"))
        if event.get("name") == "process_name":
            titles[panel] = name
        elif event.get("name") == "thread_name" and (words := _LANE.fullmatch(name)):
            lanes[lane] = int(words[1]), words[2]
    for event in events:
        panel, lane = str(event.get("pid")), (str(event.get("pid")), str(event.get("tid")))
        start, length = 1e-6 * _number(event.get("ts")), 1e-6 * _number(event.get("dur"))
        if event.get("ph") == "X" and lane in lanes and math.isfinite(start) and 0 <= length < math.inf:
            span = TimeSpan(*lanes[lane], str(event.get("name")), start, start + length)
            panels.setdefault(titles.get(panel, ""), []).append(span)
    if not panels:
        raise Unreadable(f"{path}: expected a trace with threads such as 'rank 0 computes', got none")
    return panels


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # of JSON's integers, which have no end
        return math.inf


def as_object(value: object) -> Object:
    """Of what is none, an empty one."""
    return value if isinstance(value, dict) else {}


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)
