"""`python -m bench run`: the benchmarks of a selection, and one JSON of what they said."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.results import Results, cause, for_github_action, read
from tpkernels.cli import bad_use_if, write_json

ROOT = Path(__file__).parents[1]
NOTHING_RAN = (2, 3, 4, 5)  # pytest's exit codes for interruption, its own errors, bad use, no tests


class NothingRan(RuntimeError):
    """pytest ended without running what was asked for."""


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--smoke", action="store_true", help="the small set, for a CPU")
    chosen.add_argument("--gpu-set", action="store_true", help="what `make gpu` runs")
    parser.add_argument("--count", action="store_true", help="count what ours does; few rounds are timed")
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no case after so many")
    parser.add_argument("-k", metavar="EXPRESSION", help="only these of it, as for pytest")
    parser.add_argument("--github-action", type=Path, metavar="FOLDER", help="for github-action-benchmark")
    default = Path("out/bench.json")
    parser.add_argument("-o", type=Path, default=default, metavar="FILE", help=f"where to write ({default})")


def main(options: Namespace) -> int:
    marks = [name for name in ("smoke", "gpu_set") if getattr(options, name)]
    like = ["-k", options.k] if options.k else []
    counts = ["--count"] * options.count
    chosen_by = [*(f"--{name.replace('_', '-')}" for name in marks), *like, *counts]
    selection = ["bench", *(word for name in marks for word in ("-m", name)), *like, *counts]
    if options.seconds is not None:
        selection += ["--seconds", str(options.seconds)]
    with bad_use_if(NothingRan, OSError):
        options.o.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "-m", "bench", "run", *chosen_by])
        results = run(selection, options.o, command=command)
        for tool, entries in for_github_action(results).items() if options.github_action else ():
            write_json(options.github_action / f"{tool}.json", entries)
    for name, why in results.failures.items():
        print(f"failed: {name}: {cause(why)}")
    print(f"{len(results.infos)} results are in {options.o}")
    return 1 if results.failures else 0


def run(
    selection: Sequence[str], target: Path, *, command: str, environment: Mapping[str, str] | None = None
) -> Results:
    """Run what pytest takes `selection` for, and write the results into `target`."""
    with tempfile.TemporaryDirectory() as folder:
        timed, outcomes = Path(folder, "benchmarks.json"), Path(folder, "outcomes.json")
        pytest = [sys.executable, "-m", "pytest", "-q", "--benchmark-quiet", "--benchmark-json", str(timed)]
        command_line = [*pytest, "--outcomes", str(outcomes), *selection]
        code = subprocess.run(command_line, cwd=ROOT, env=environment, check=False).returncode
        if code in NOTHING_RAN or not outcomes.exists():
            raise NothingRan(f"pytest {shlex.join(selection)} ended with exit code {code}, see above")
        # where every case failed there are no times
        report = (
            json.loads(timed.read_text()) if timed.exists() and timed.stat().st_size else {"benchmarks": []}
        )
        report |= {"outcomes": json.loads(outcomes.read_text()), "command": command}
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return read(target)
