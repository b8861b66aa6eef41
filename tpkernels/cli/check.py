"""`python -m tpkernels check`: would the kernels still be right and fast? Answered without a GPU.

Compiles every catalog entry and holds what the compiler made of it to rules and budgets, then runs every
launcher in Triton's interpreter against float64. Exit code 1 means a regression.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tpkernels import __version__
from tpkernels.cli import OneLineParser, Progress, written_to

if TYPE_CHECKING:
    from tpkernels.gate.check_compile import Compiled, Job
    from tpkernels.gate.check_numerics import Computed

PROCESSES = 2
PACKAGES = ("triton", "torch", "numpy")


def main(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m tpkernels check",
        description="Compile the kernels and run them in Triton's interpreter, without a GPU.",
    )
    parser.add_argument("--arch", metavar="LIST", help="compile for these GPUs only, such as sm_90,gfx942")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="what has NAME between slashes in its name, such as linear or '*glu/pointer'",
    )
    parser.add_argument("--skip", choices=("compile", "numerics"), help="leave one half out")
    parser.add_argument(
        "--json", type=written_to, metavar="FILE", help="write all facts and findings into FILE"
    )
    parser.add_argument("--update", action="store_true", help="make today's numbers the budgets")
    options = parser.parse_args(argv)
    if options.skip == "compile" and (options.update or options.arch is not None):
        parser.error("--update and --arch are about compiling: leave --skip compile out")
    for package in PACKAGES:
        if find_spec(package) is None:
            parser.error(f"{package} is not installed, and the check needs it")

    start = time.perf_counter()
    try:
        jobs = [] if options.skip == "compile" else _jobs(options.arch, options.only)
        compiled, notes = _compile(jobs, options.update) if jobs else ([], [])
        computed = [] if options.skip == "numerics" else _compute(options.only)
        if not compiled and not computed:
            where = f" on {options.arch}" if options.arch else ""
            parser.error(f"nothing{where} has {options.only!r} in its name")
        return _report(options.json, compiled, computed, notes, time.perf_counter() - start)
    except UsageError as error:
        parser.error(str(error))


class UsageError(Exception):
    """What nothing can be checked with, in words."""


def _jobs(wanted: str | None, only: str) -> list[Job]:
    from tpkernels.gate.ahead_of_time import ARCHITECTURES
    from tpkernels.gate.catalog import catalog
    from tpkernels.gate.check_compile import jobs_of

    architectures = ARCHITECTURES if wanted is None else tuple(dict.fromkeys(wanted.split(",")))
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown:
        raise UsageError(
            f"expected --arch of {', '.join(ARCHITECTURES)}; got {', '.join(map(repr, unknown))}"
        )
    return jobs_of(catalog(), architectures, only)


def _compile(jobs: Sequence[Job], update: bool) -> tuple[list[Compiled], list[str]]:
    """What came of the jobs, and notes on the table of budgets."""
    import triton

    from tpkernels.gate import budgets
    from tpkernels.gate.ahead_of_time import Facts
    from tpkernels.gate.catalog import catalog
    from tpkernels.gate.check_compile import compile_all, judge
    from tpkernels.kernels.footprints import TABLE

    try:
        table = budgets.read()
    except ValueError as error:
        raise UsageError(str(error)) from error
    with Progress("compiling", len(jobs)) as step:
        results = compile_all(jobs, PROCESSES, step)
    minor, notes = budgets.minor_version(triton.__version__), []
    current = {(gpu, entry.name) for entry in catalog() for gpu in entry.architectures}
    if update:
        facts = {
            (job.architecture, job.entry.name): result
            for job, result in zip(jobs, results, strict=True)
            if isinstance(result, Facts)
        }
        provenance = {"triton": triton.__version__, "date": date.today().isoformat(), "by": "check --update"}
        table[minor] = budgets.updated(table.get(minor), facts, current, provenance)
        try:
            budgets.write(table)
        except OSError as error:
            raise UsageError(f"cannot write the budgets: {error}") from error
        notes.append(f"{len(facts)} budgets for Triton {minor} written into {TABLE}")
    elif minor not in table:
        known = ", ".join(sorted(table)) or "none"
        notes.append(f"no budgets for Triton {minor} (there are for {known}): rules only; see --update")
    elif gone := table[minor].keys() - current:
        notes.append(f"{len(gone)} budgets of what is no longer in the catalog: --update drops them")
    found = table.get(minor)
    return [judge(*pair, found, triton.__version__) for pair in zip(jobs, results, strict=True)], notes


def _compute(only: str) -> list[Computed]:
    from tpkernels.gate.check_numerics import run_numerics

    with Progress("computing") as step:
        return run_numerics(only, step)


def _report(
    path: Path | None,
    compiled: Sequence[Compiled],
    computed: Sequence[Computed],
    notes: Sequence[str],
    seconds: float,
) -> int:
    from tpkernels.gate import check_report

    modules = {name: import_module(name) for name in PACKAGES}
    versions = {"tpkernels": __version__} | {name: module.__version__ for name, module in modules.items()}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    check_report.print_compiled(compiled)
    check_report.print_computed(computed)
    print()
    for note in notes:
        print(f"note: {note}")
    failures = check_report.failure_lines(compiled, computed)
    for failure in failures:
        print(failure)
    told = f"{len(compiled)} compilations and {len(computed)} computations in {seconds:.0f} s"
    print(f"{len(failures)} failures in {told}" if failures else f"all well: {told}")
    if path is not None:
        report = check_report.as_json(versions, compiled, computed, notes)
        try:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the report: {error}") from error
    return 1 if failures else 0
