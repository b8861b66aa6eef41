"""`python -m bench gate`: does an op do more than before?

What the small set does is counted, and compared with the baseline exactly. Times refuse nothing, unless
`--times` names two runs.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.baseline import FILE, UPDATE, baseline_of, read_baseline
from bench.results import BadFile, Results, read
from bench.run import NothingRan, run
from bench.verdict import MEANT, Finding, of_counts, of_failures, of_times
from tpkernels.cli import BadUse, bad_use_if, write_json, written_to
from tpkernels.extension import ExtensionState, extension

GREEN, REGRESSION = 0, 1
KEPT = "TPKERNELS_CACHE_DIR"  # others of our variables change what ops do


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--baseline", type=Path, default=FILE, metavar="FILE", help=f"counts ({FILE.name})")
    parser.add_argument("--update", action="store_true", help="make what is counted now the baseline")
    absent = "no counts for this torch are no failure"
    parser.add_argument("--allow-no-baseline", action="store_true", help=absent)
    fell = "count nothing: refuse ratios of NOW that fell since BEFORE, two files of `bench run`"
    parser.add_argument("--times", type=Path, nargs=2, metavar=("BEFORE", "NOW"), help=fell)
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write what was found into FILE")


def main(options: Namespace) -> int:
    with bad_use_if(BadFile, NothingRan, OSError):
        if options.times:
            found = _times(*options.times)
        elif options.update:
            found = _update(options.baseline)
        else:
            found = _counts(options.baseline, options.allow_no_baseline)
    write_json(options.json, {"findings": [asdict(finding) for finding in found]})
    return REGRESSION if any(finding.fails for finding in found) else GREEN


def _times(*paths: Path) -> list[Finding]:
    before, now = map(read, paths)
    if before.device != now.device:
        raise BadFile(
            f"{paths[0]} is of {before.device!r}, {paths[1]} is of {now.device!r}: ratios of one device say "
            "nothing of another"
        )
    found = list(of_times(before, now))
    held = f"{len(before.infos)} cases were compared with {paths[0]} by their times"
    print(*lines(found, meant=False), held, sep="\n")
    return found


def _update(path: Path) -> list[Finding]:
    results = _counted()
    if results.failures:
        raise BadFile(f"no baseline is made of a run with failures: {', '.join(results.failures)}; mend them")
    baseline_of(results.counted).write(path)
    print(f"{len(results.counted)} cases are the baseline in {os.path.relpath(path)}: commit it")
    return []


def _counts(path: Path, allow_no_baseline: bool) -> list[Finding]:
    """What the small set does now, against the baseline."""
    baseline = read_baseline(path) if path.exists() else None
    shown = os.path.relpath(path)
    why_not = baseline.why_not() if baseline else f"no counts: {shown} is not there"
    if why_not and not allow_no_baseline:
        print(f"{why_not}; make a baseline by `{UPDATE}`, or --allow-no-baseline")
        return [Finding("missing", shown, why_not)]
    results = _counted()
    if baseline is None or why_not:
        found = list(of_failures(results))
        held = f"{why_not}: {len(results.counted)} cases ran, and **none was compared**"
    else:
        found = list(of_counts(baseline.cases, results))
        equal = len(results.counted.keys() - {one.case for one in found})
        held = f"{equal} of {len(baseline.cases)} cases do what {shown} says{baseline.note()}"
    print(*lines(found), held, sep="\n")
    return found


def _counted() -> Results:
    if extension().state is not ExtensionState.LOADED:
        raise BadUse(f"counts are of steps in C++, and the extension is {extension().detail}")
    with tempfile.TemporaryDirectory() as folder:
        selection, command = ["bench", "-m", "smoke", "--count"], "python -m bench gate"
        return run(selection, Path(folder, "bench.json"), command=command, environment=environment())


def environment() -> Mapping[str, str]:
    """Ours, without what a CI may have set that changes what is counted."""
    others = ("TPKERNELS_", "TRITON_", "PYTEST_")
    kept = {name: text for name, text in os.environ.items() if name == KEPT or not name.startswith(others)}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # on a GPU others are chosen


def lines(findings: Sequence[Finding], *, meant: bool = True) -> list[str]:
    """A line of each finding. meant: whether --update may accept them, if none is a mistake"""
    width = max((len(one.case) for one in findings), default=0)
    said = [f"{one.kind:<14}  {one.case:<{width}}  {one.text}" for one in findings]
    failing = [one for one in findings if one.fails]
    if failing:
        meant = meant and all(one.kind in MEANT for one in findings)
        said.append(f"regressions: {len(failing)}{'; if they are meant: --update' * meant}")
    elif findings:
        said.append("better: --update keeps it")
    return said
