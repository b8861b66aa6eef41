"""The counts of the small set that the gate compares with, in one file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.counts import Counts
from bench.results import BadFile, read_json

FILE = Path(__file__).parent / "baselines" / "counts.json"
UPDATE = "python -m bench gate --update"


@dataclass(frozen=True)
class Baseline:
    torch: str  # versions
    python: str
    cases: Mapping[str, Counts]

    def why_not(self) -> str:
        """Return why it says nothing of the torch that is installed, whose operators may be others."""
        if minor(self.torch) == minor(torch.__version__):
            return ""
        return f"no counts for torch {minor(torch.__version__)}: the baseline is of {self.torch}"

    def note(self) -> str:
        """Return which versions differ, though it holds."""
        now = {"torch": torch.__version__, "python": sys.version.split()[0]}
        was = {"torch": self.torch, "python": self.python}
        return ", ".join(f"{name} {was[name]} is {now[name]} now" for name in now if was[name] != now[name])

    def write(self, path: Path) -> None:
        """Write a line for each kind of count, so that a diff shows what changed."""
        cases = {
            name: ",\n".join(f"   {json.dumps(kind)}: {json.dumps(named)}" for kind, named in counts.items())
            for name, counts in sorted(self.cases.items())
        }
        body = ",\n".join(f"  {json.dumps(name)}: {{\n{lines}\n  }}" for name, lines in cases.items())
        versions = f' "torch": {json.dumps(self.torch)},\n "python": {json.dumps(self.python)}'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{\n{versions},\n "cases": {{\n{body}\n }}\n}}\n', encoding="utf-8")


def baseline_of(cases: Mapping[str, Counts]) -> Baseline:
    return Baseline(torch.__version__, sys.version.split()[0], cases)


def minor(version: str) -> str:
    """
    >>> minor("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split(".")[:2])


def read_baseline(path: Path) -> Baseline:
    try:
        baseline = Baseline(**read_json(path, UPDATE))
        assert isinstance(baseline.torch, str)
        assert isinstance(baseline.python, str)
        assert all(
            isinstance(count, int)
            for counts in baseline.cases.values()
            for named in counts.values()
            for count in named.values()
        )
    except (AssertionError, AttributeError, TypeError) as error:
        raise BadFile(f"{path}: expected a baseline of counts; make it by `{UPDATE}`") from error
    return baseline
