"""`python -m bench gate`: has anything become slower, wrong, or gone missing?

Ratios are compared with the baseline of their device, and kernels as compiled with their budgets.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.baseline import (
    FLOOR,
    Baseline,
    machine,
    made_of,
    path_for,
    read_baseline,
    shown,
    this_device,
    write_baseline,
)
from bench.results import BadFile, Results, pooled, read
from bench.run import NothingRan, run
from bench.verdict import SLOWED, Finding, findings, hides_a_slowdown, suspects
from tpkernels.cli import BadUse, add_number, bad_use_if, write_json, written_to

GREEN, REGRESSION = 0, 1
Again = Callable[[Sequence[str]], Results]  # times cases of these names, once


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument(
        "results", nargs="*", type=Path, metavar="RESULTS", help="of `bench run`; else run it"
    )
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="else bench/baselines/<device>.json")
    add_number(parser, "--repeat", "runs of what seems slower, it alone", 5, least=0)
    parser.add_argument("--skip", choices=("timings", "kernels"), help="leave one half out")
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write what was found into FILE")
    update = parser.add_argument_group("a new baseline")
    update.add_argument("--update", action="store_true", help="make these results the baseline")
    update.add_argument("--floor", type=float, default=FLOOR, help=f"a fall by less is none ({FLOOR})")
    update.add_argument("--note", default="", help="what else one should know of them")


def main(options: Namespace) -> int:
    if not 0 < options.floor < 1:
        raise BadUse(f"expected --floor between 0 and 1, got {options.floor}")
    if options.skip == "timings" and (options.update or options.results):
        raise BadUse("RESULTS and --update are about timings: leave --skip timings out")
    if options.update:
        options.skip = "kernels"  # whose numbers have `python -m tpkernels check --update`
    with bad_use_if(BadFile, NothingRan, OSError):
        timed = GREEN if options.skip == "timings" else _timings(options)
    return timed or (GREEN if options.skip == "kernels" else _kernels())


def _timings(options: Namespace) -> int:
    results = pooled([read(path) for path in options.results] or [_fresh(options)])
    device = results.device if results.infos else this_device()
    path = options.baseline or path_for(device)
    if options.update:
        return _update(results, path, options.floor, options.note)
    baseline = read_baseline(path, device)
    repeats = options.repeat if device == this_device() else 0
    judged = judge(baseline, results, _again, repeats)
    for line in judged.lines(baseline, path):
        print(line)
    found = [asdict(finding) for finding in judged.findings]
    write_json(options.json, {"baseline": str(path), "findings": found, "repeats": judged.repeats})
    return REGRESSION if judged.failing else GREEN


def _fresh(options: Namespace) -> Results:
    """Of this machine, now."""
    device = this_device()
    if not options.update:
        read_baseline(options.baseline or path_for(device), device)  # tells before minutes have passed
    selection = "smoke" if device == "cpu" else "gpu_set"
    with tempfile.TemporaryDirectory() as folder:
        command = f"python -m bench run --{selection.replace('_', '-')}"
        return run(["bench", "-m", selection], Path(folder, "bench.json"), command=command)


def _again(names: Sequence[str]) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        return run(names, Path(folder, "bench.json"), command="again", quiet=True)


def _update(results: Results, path: Path, floor: float, note: str) -> int:
    if results.failures:
        raise BadFile(f"no baseline is made of a run with failures: {', '.join(results.failures)}; mend them")
    if not results.infos:
        raise BadFile("no baseline is made of no results")
    write_baseline(made_of(results, floor, note), path)
    print(f"{len(results.infos)} cases of {results.device} are the baseline in {shown(path)}: commit it")
    return GREEN


@dataclass(frozen=True)
class Judged:
    """What was found at last, after repetitions."""

    results: Results
    findings: list[Finding]
    repeats: int

    @property
    def failing(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.fails]

    def lines(self, baseline: Baseline, path: Path) -> list[str]:
        failing = {finding.case for finding in self.failing}
        held = len(self.results.infos.keys() & baseline.cases.keys() - failing)
        hiding = [
            name
            for name, was in baseline.cases.items()
            if name in self.results.infos.keys() - failing
            and hides_a_slowdown(was, self.results.infos[name], baseline.floor)
        ]
        width = max((len(finding.case) for finding in self.findings), default=0)
        table = [f"{one.kind:<14}  {one.case:<{width}}  {one.text}" for one in self.findings]
        lines = [*table, f"{held} of {len(baseline.cases)} cases hold against {shown(path)} ({baseline})"]
        if versions := _other_versions(baseline, self.results):
            lines.append(f"made with other versions: {versions}; where naive became faster, ratios fall")
        if self.failing and baseline.made.get("machine") != machine():
            lines.append(f"the baseline is of another machine: {baseline.made.get('machine')}")
        if hiding:
            names = ", ".join(hiding)
            lines.append(
                f"{len(hiding)} became faster, and would hide a slow-down of {SLOWED:g}x; --update makes "
                f"a new baseline: {names}"
            )
        if self.repeats:
            lines.append(f"what seemed slower was timed {self.repeats} more times: medians count")
        if self.failing:
            lines.append(f"regressions: {len(self.failing)}; if they are meant: --update")
        return lines


def judge(baseline: Baseline, results: Results, again: Again, repeats: int) -> Judged:
    """What seems slower is timed `repeats` times again, it alone; the medians of all runs count."""
    again_for = suspects(baseline, results) if repeats else []
    if again_for:
        results = pooled([results, *(again(again_for) for _ in range(repeats))])
        infos = {name: info for name, info in results.infos.items() if name not in results.failures}
        results = replace(results, infos=infos)  # one that went wrong once is wrong
    return Judged(results, list(findings(baseline, results)), repeats if again_for else 0)


def _other_versions(baseline: Baseline, results: Results) -> str:
    """torch 2.13.0 is 2.14.0 now"""
    was = baseline.made.get("versions", {})
    now = next(iter(results.infos.values()), {}).get("versions", {})
    return ", ".join(
        f"{name} {was.get(name)} is {now[name]} now" for name in now if was.get(name) != now[name]
    )


def _kernels() -> int:
    """Registers, shared memory, spills and instructions of every kernel, without tolerance."""
    command = [sys.executable, "-m", "tpkernels", "check", "--skip", "numerics"]
    return subprocess.run(command, check=False).returncode
