"""Times today's code and that of a baseline's revision, interleaved, here and now.

How many times faster ours is than the naive way depends on the processor, and on what else it has to do: a
ratio lower than that of another day has come from either, or from our code. The two codes in turns share
processor and load, so what is left between them is our code.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.results import Results
from bench.run import ROOT

LEAST_PAIRS, MOST_PAIRS = 3, 8
# Student's t of 95 %, two-sided, by degrees of freedom: one fewer than pairs
T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}

Measure = Callable[[Sequence[str]], Results]  # the cases of these names, once
Verdict = Literal["fell", "holds", "open"]


class Unavailable(RuntimeError):
    """The code of a revision cannot be had: why."""


@dataclass(frozen=True)
class Change:
    """Of one case: its ratio today, in parts of that of the former code, pair by pair."""

    pairs: Sequence[float]

    @property
    def middle(self) -> float:
        return statistics.median(self.pairs)

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, for the mean of logarithms: half and twice are equally far from the same."""
        logs = [math.log(pair) for pair in self.pairs]
        mean, count = statistics.fmean(logs), len(logs)
        reach = T[count - 1] * statistics.stdev(logs) / math.sqrt(count)
        return math.exp(mean - reach), math.exp(mean + reach)

    def verdict(self, floor: float) -> Verdict:
        """Open while the interval holds the least that is no fall, and more pairs may be timed."""
        if len(self.pairs) < LEAST_PAIRS:
            return "open"
        low, high = self.interval
        if low > 1 - floor:
            return "holds"
        if high < 1 - floor:
            return "fell"
        if len(self.pairs) < MOST_PAIRS:
            return "open"
        return "holds" if self.middle >= 1 - floor else "fell"

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.middle:.2f} ({low:.2f} to {high:.2f}) of it in {len(self.pairs)} pairs of runs"


def changes(
    names: Sequence[str], now: Measure, then: Measure, floor: float, step: Callable[[object], None]
) -> Mapping[str, Change]:
    """Of the cases that both codes can time: pairs until each is told, each code first in turn."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(MOST_PAIRS):
        open_ = [name for name, pairs in found.items() if Change(pairs).verdict(floor) == "open"]
        if not open_:
            break
        order = (now, then) if number % 2 == 0 else (then, now)
        runs = {measure: measure(open_) for measure in order}
        for name in open_:
            ours, theirs = (runs[measure].infos.get(name) for measure in (now, then))
            if ours is None or theirs is None:
                del found[name]
            else:
                found[name].append(ours["ratio"] / theirs["ratio"])
        step(f"pair {number + 1} of {len(open_)} cases")
    return {name: Change(pairs) for name, pairs in found.items()}


@contextmanager
def checked_out(revision: str | None, root: Path = ROOT) -> Iterator[Path]:
    """The files of a commit in a folder of their own, which is gone afterwards."""
    if not re.fullmatch("[0-9a-f]{7,40}", revision or ""):  # a + stands for changes beside the commit
        raise Unavailable(f"the baseline is of files that no commit holds (revision {revision})")
    with tempfile.TemporaryDirectory(prefix="tpkernels-former-") as folder:
        archive, files = Path(folder, "files.zip"), Path(folder, "files")
        assert revision is not None, "it matched"
        _git(root, "archive", "--format=zip", f"--output={archive}", revision)
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(files)
        if _unchanged(root, revision, "csrc"):  # else its first use builds it
            for library in (root / "tpkernels").glob("_C*.so"):
                shutil.copy(library, files / "tpkernels")
        yield files


def _git(root: Path, *arguments: str) -> None:
    command = ["git", "-C", str(root), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"git does not run: {error}") from error
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["git failed"])[-1]
        raise Unavailable(f"{last}; a shallow clone gets it by `git fetch --unshallow`")


def _unchanged(root: Path, revision: str, path: str) -> bool:
    command = ["git", "-C", str(root), "diff", "--quiet", revision, "--", path]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
