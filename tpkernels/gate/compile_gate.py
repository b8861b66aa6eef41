"""The compile gate: every catalog entry on each of its architectures, held to rules and budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import triton

from tpkernels.gate import budgets
from tpkernels.gate.ahead_of_time import ARCHITECTURES, Facts, Job, compile_all
from tpkernels.gate.budgets import Budgets
from tpkernels.gate.catalog import catalog, has_parts
from tpkernels.gate.expectations import violations
from tpkernels.gate.recording import HAS_GLUON
from tpkernels.kernels.footprints import TABLE


@dataclass(frozen=True)
class Compiled:
    """A job with what came of it."""

    job: Job
    facts: Facts | None  # None if it does not compile
    failures: tuple[str, ...]


class UsageError(Exception):
    """What nothing can be checked with, in words."""


def jobs_of(architectures: Sequence[str], only: str) -> list[Job]:
    """Architecture by architecture; `only` as in `has_parts`."""
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown:
        raise UsageError(
            f"expected --arch of {', '.join(ARCHITECTURES)}; got {', '.join(map(repr, unknown))}"
        )
    chosen = [entry for entry in catalog() if has_parts(entry.name, only)]
    return [
        Job(entry, architecture)
        for architecture in dict.fromkeys(architectures)
        for entry in chosen
        if architecture in entry.architectures
    ]


def check(
    jobs: Sequence[Job], processes: int, report: Callable[[Job], None], update: bool
) -> tuple[list[Compiled], list[str]]:
    """What came of the jobs, and notes on the table of budgets.

    report: hears of each job as it is done
    update: make what the jobs take the budgets, and write them
    """
    try:
        table = budgets.read()
    except ValueError as error:
        raise UsageError(str(error)) from error
    results = compile_all(jobs, processes, report)
    minor, notes = budgets.minor_version(triton.__version__), []
    if not HAS_GLUON and any(job.architecture == "sm_90" for job in jobs):
        notes.append(f"kernels in Gluon are left out: they need Triton 3.7, this is {triton.__version__}")
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


def judge(job: Job, result: Facts | str, budgets: Budgets | None, triton_version: str) -> Compiled:
    """Hold a result to the rules, and to its budget if there is a table for this Triton."""
    if isinstance(result, str):
        return Compiled(job, None, (f"does not compile: {result}",))
    failures = [*violations(job.entry, job.architecture, result)]
    if budgets is not None:
        budget = budgets.of(job.architecture, job.entry.name)
        failures += budget.excesses(result) if budget else ["no budget yet: record one with --update"]
        same_triton = budgets.provenance.get("triton") == triton_version
        changes = ", ".join(budget.changes(result)) if budget and same_triton else ""
        if changes and not failures:  # what is worse says more
            failures.append(f"other instructions: {changes}; record them with --update if that is meant")
    return Compiled(job, result, tuple(failures))
