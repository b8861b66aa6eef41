"""The counts of the small set that the gate compares with, in one file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        return "".join(f"; {name} {was[name]} is {now[name]} now" for name in now if was[name] != now[name])

    def write(self, path: Path) -> None:
        """Write a line for each kind of count, so that a diff shows what changed."""
        text = json.dumps(asdict(self), indent=1)
        text = re.sub(r"\{([^{}]*)\}", lambda named: f"{{{' '.join(named[1].split())}}}", text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def baseline_of(cases: Mapping[str, Counts]) -> Baseline:
    return Baseline(torch.__version__, sys.version.split()[0], dict(sorted(cases.items())))


def minor(version: str) -> str:
    """
    >>> minor("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split(".")[:2])


def read_baseline(path: Path) -> Baseline:
    try:
        baseline = Baseline(**read_json(path, UPDATE))
        kinds = [named for counts in baseline.cases.values() for named in counts.values()]
        assert all(isinstance(count, int) for named in kinds for count in named.values())
        assert all(isinstance(version, str) for version in (baseline.torch, baseline.python))
    except (AssertionError, AttributeError, TypeError) as error:
        raise BadFile(f"{path}: expected a baseline of counts; make it by `{UPDATE}`") from error
    return baseline
