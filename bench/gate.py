"""`python -m bench gate`: does an op do more than before?

What the small set does is counted, and compared with the baseline exactly. Times refuse nothing, unless
`--times` names a run to compare with.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.baseline import FILE, UPDATE, baseline_of, read_baseline
from bench.results import BadFile, Results, read
from bench.run import NothingRan, run
from bench.verdict import MEANT, Finding, of_counts, of_times
from tpkernels.cli import BadUse, add_number, bad_use_if, write_json, written_to
from tpkernels.extension import ExtensionState, extension

GREEN, REGRESSION = 0, 1
KEPT = ("TPKERNELS_CACHE_DIR",)  # of our variables: others change what ops do
REPEATED = ("slower", "broken promise")  # what may be noise
Again = Callable[[Sequence[str]], Results]  # times cases of these names, once


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--baseline", type=Path, default=FILE, metavar="FILE", help=f"counts ({FILE.name})")
    parser.add_argument("--update", action="store_true", help="make what is counted now the baseline")
    parser.add_argument(
        "--allow-no-baseline", action="store_true", help="no counts for this torch are no failure"
    )
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write what was found into FILE")
    times = parser.add_argument_group("times")
    times.add_argument("--times", type=Path, metavar="BEFORE", help="refuse ratios that fell since this run")
    times.add_argument(
        "results", nargs="?", type=Path, metavar="NOW", help="a run, whose times alone are compared; else run"
    )
    add_number(times, "--repeat", "runs of what seems slower, it alone", 2, least=0)


def main(options: Namespace) -> int:
    if options.results and not options.times:
        raise BadUse(f"{options.results} is compared by its times: expected --times BEFORE, a run of before")
    if options.results and options.update:
        raise BadUse(f"--update counts what is done now: leave {options.results} out")
    findings: list[Finding] = []
    with bad_use_if(BadFile, NothingRan, OSError):
        before = read(options.times) if options.times else None  # tells before minutes have passed
        if not options.results:
            findings += _counts(options)
        if before:
            findings += _times(before, options)
    write_json(options.json, {"findings": [asdict(finding) for finding in findings]})
    return REGRESSION if any(finding.fails for finding in findings) else GREEN


def _counts(options: Namespace) -> list[Finding]:
    """What the small set does now, against the baseline."""
    if extension().state is not ExtensionState.LOADED:
        raise BadUse(f"counts are of steps in C++, and the extension is {extension().detail}")
    shown, why_not = os.path.relpath(options.baseline), ""
    if not options.update:
        if options.baseline.exists():
            baseline = read_baseline(options.baseline)
            why_not = baseline.why_not()
        else:
            baseline, why_not = baseline_of({}), f"no counts: {shown} is not there"
        if why_not and not options.allow_no_baseline:
            print(f"{why_not}; make a baseline by `{UPDATE}`, or --allow-no-baseline")
            return [Finding("missing", "", why_not)]
    results = _run(["bench", "-m", "smoke", "--count"], "python -m bench gate", environment=_environment())
    if options.update:
        if results.failures:
            raise BadFile(f"no baseline is made of a run with failures: {', '.join(results.failures)}")
        baseline_of(results.counted).write(options.baseline)
        print(f"{len(results.counted)} cases are the baseline in {shown}: commit it")
        return []
    findings = [one for one in of_counts(baseline.cases, results) if not why_not or one.kind == "wrong"]
    for line in lines(findings):
        print(line)
    if why_not:
        print(f"{why_not}: {len(results.counted)} cases ran, and **none was compared**")
    else:
        held = len(results.counted.keys() - {one.case for one in findings})
        note = f"; {baseline.note()}" if baseline.note() else ""
        print(f"{held} of {len(baseline.cases)} cases do what {shown} says{note}")
    return findings


def _environment() -> dict[str, str]:
    """What a CI has set does not change what is counted."""
    ours = [name for name in os.environ if name.startswith(("TPKERNELS_", "TRITON_", "PYTEST_"))]
    return {name: os.environ[name] for name in os.environ if name in KEPT or name not in ours} | {
        "OMP_NUM_THREADS": "1"
    }


def _run(
    selection: Sequence[str], command: str, *, quiet: bool = False, environment: dict[str, str] | None = None
) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "bench.json")
        return run(selection, target, command=command, quiet=quiet, environment=environment)


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line of each finding; what to do is told where no other is a mistake."""
    width = max((len(one.case) for one in findings), default=0)
    said = [f"{one.kind:<14}  {one.case:<{width}}  {one.text}" for one in findings]
    failing = [one for one in findings if one.fails]
    if failing:
        meant = "; if they are meant: --update" * all(one.kind in MEANT for one in findings)
        said.append(f"regressions: {len(failing)}{meant}")
    elif findings:
        said.append("better: --update keeps it")
    return said


def _times(before: Results, options: Namespace) -> list[Finding]:
    """What became slower, against naive, since another run on this device."""
    selection = "smoke" if before.device == "cpu" else "gpu_set"
    command = f"python -m bench run --{selection.replace('_', '-')}"
    now = read(options.results) if options.results else _run(["bench", "-m", selection], command)
    if before.device != now.device:
        raise BadFile(
            f"{options.times} is of {before.device!r}, these results are of {now.device!r}: ratios of one "
            "device say nothing of another"
        )
    findings = judge(before, now, lambda names: _run(names, "again", quiet=True), options.repeat)
    for line in lines(findings):
        print(line)
    print(f"{len(before.infos)} cases were compared by their times with {options.times}")
    return findings


def judge(before: Results, now: Results, again: Again, repeats: int) -> list[Finding]:
    """What seems slower is timed again, it alone, and is slower if it is so each time."""
    findings = list(of_times(before, now))
    for _ in range(repeats):
        names = sorted({one.case for one in findings if one.kind in REPEATED})
        if not names:
            break
        anew = again(names)
        seen = {(one.kind, one.case): one for one in of_times(before, anew) if one.case in names}
        findings = [seen.get((one.kind, one.case), one) for one in findings
                    if one.kind not in REPEATED or (one.kind, one.case) in seen]  # fmt: skip
        findings += [one for one in seen.values() if one.kind == "wrong"]
    return findings
