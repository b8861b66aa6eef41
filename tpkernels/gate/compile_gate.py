"""The compile gate: every entry on each of its architectures, held to rules, budgets and cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

import triton

from tpkernels.gate import expectations
from tpkernels.gate.ahead_of_time import ARCHITECTURES, CLOCKED, CompileJob, Entry, Facts
from tpkernels.gate.clock.cost import Cost
from tpkernels.gate.clocking import (
    ClockedJob,
    Examined,
    Launching,
    examine_all,
)
from tpkernels.gate.expectations import Budget, Budgets
from tpkernels.gate.rules import violations


@dataclass(frozen=True)
class Compiled:
    """A job with what came of it."""

    job: CompileJob
    facts: Facts | None  # None if it does not compile
    failures: tuple[str, ...]
    cost: Cost | None = None  # None if it is not clocked


class UsageError(Exception):
    """What nothing can be checked with, in words."""


@dataclass(frozen=True)
class Suite:
    """Entries that are checked together."""

    name: str
    entries: Mapping[str, Entry]  # by name
    budgets: Path
    launching: Callable[[Entry], Launching | None]  # how it is clocked; None: it is not


def has_parts(name: str, wanted: str) -> bool:
    """What `check --only` takes: whether `wanted` is in `name` between slashes; `*` stands for anything.

    >>> has_parts("gfx942/linear/pointer/bf16", "linear/pointer")
    True
    >>> [has_parts("scatter_linear/pointer/bf16", wanted) for wanted in ("linear", "*linear")]
    [False, True]
    """
    wanted = wanted.strip("/")
    return not wanted or fnmatchcase(f"/{name}/", f"*/{wanted}/*")


def jobs_of(suite: Suite, architectures: Sequence[str], only: str) -> list[CompileJob]:
    """Architecture by architecture; `only` as in `has_parts`."""
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown:
        raise UsageError(
            f"expected --arch of {', '.join(ARCHITECTURES)}; got {', '.join(map(repr, unknown))}"
        )
    return [
        CompileJob(entry, architecture)
        for architecture in dict.fromkeys(architectures)
        for entry in suite.entries.values()
        if architecture in entry.architectures and has_parts(entry.name, only)
    ]


def check(
    suite: Suite,
    jobs: Sequence[CompileJob],
    processes: int,
    report: Callable[[ClockedJob], None],
    update: bool,
) -> tuple[list[Compiled], list[str]]:
    """What came of the jobs, and notes on the table of budgets.

    report: hears of each job as it is done
    update: make what the jobs take the budgets, and write them
    """
    try:
        table = expectations.read(suite.budgets)
    except ValueError as error:
        raise UsageError(str(error)) from error
    minor, notes = expectations.minor_version(triton.__version__), list[str]()
    before = table.get(minor, Budgets())
    tasks = [
        ClockedJob(job, suite.launching(job.entry), budget.cost if budget else None)
        if job.architecture in CLOCKED
        else ClockedJob(job, None)
        for job in jobs
        for budget in [before.of(job.architecture, job.entry.name)]
    ]
    results = examine_all(tasks, processes, report)
    current = {(gpu, name) for name, entry in suite.entries.items() for gpu in entry.architectures}
    if update:
        new = {
            (job.architecture, job.entry.name): Budget.of(result.facts, _known(result))
            for job, result in zip(jobs, results, strict=True)
            if isinstance(result.facts, Facts)
        }
        provenance = {"triton": triton.__version__, "date": date.today().isoformat(), "by": "check --update"}
        table[minor] = expectations.updated(table.get(minor), new, current, provenance)
        try:
            expectations.write(table, suite.budgets)
        except OSError as error:
            raise UsageError(f"cannot write the budgets: {error}") from error
        notes.append(f"{len(new)} budgets for Triton {minor} written into {suite.budgets}")
    elif minor not in table:
        known = f", only for {', '.join(sorted(table))}" if table else ""
        notes.append(f"no budgets for Triton {minor}{known}: rules only; --update writes them")
    else:
        if bare := dict.fromkeys(a for job in jobs if not table[minor].hold(a := job.architecture)):
            notes.append(
                f"no budgets for Triton {minor} on {', '.join(bare)}: rules only; --update writes them"
            )
        if gone := table[minor].keys() - current:
            notes.append(f"{len(gone)} budgets of what is no longer in {suite.name}: --update drops them")
    if not update and (anew := sum(map(_is_clocked_anew, tasks, results))):
        notes.append(f"{anew} kernels were clocked anew: --update keeps their cycles for other machines")
    found = table.get(minor)
    judged = (judge(*pair, found, triton.__version__) for pair in zip(jobs, results, strict=True))
    return list(judged), notes


def judge(job: CompileJob, result: Examined, budgets: Budgets | None, triton_version: str) -> Compiled:
    """Hold a result to the rules of its entry, and to its budget.

    Without a table of this Triton for this architecture there are the rules alone.
    """
    facts, cost = result.facts, _known(result)
    if isinstance(facts, str):
        return Compiled(job, None, (f"does not compile: {facts}",))
    failures = [*violations(job.entry.rules, job.architecture, facts)]
    if isinstance(result.cost, str):
        failures.append(f"cannot be clocked: {result.cost}")
    if budgets is not None and budgets.hold(job.architecture):
        budget = budgets.of(job.architecture, job.entry.name)
        failures += budget.excesses(facts) if budget else ["no budget yet: record one with --update"]
        if budget and budgets.provenance.get("triton") == triton_version:
            failures += _by_the_same_triton(budget, facts, cost, bool(failures))
    return Compiled(job, facts, tuple(failures), cost)


def _by_the_same_triton(budget: Budget, facts: Facts, cost: Cost | None, is_worse: bool) -> Iterator[str]:
    """What only the version of Triton that a budget was made with can be held to."""
    slower = [*expectations.slower(budget.cycles, cost)] if cost else []
    yield from slower
    if is_worse or slower:  # which says more
        return
    if cost and (faster := ", ".join(expectations.faster(budget.cycles, cost))):
        yield f"faster: {faster}; record it with --update"
    if changes := ", ".join(budget.changes(facts)):
        yield f"other instructions: {changes}; record them with --update if that is meant"


def _is_clocked_anew(task: ClockedJob, result: Examined) -> bool:
    cost = _known(result)
    return cost is not None and (task.kept is None or task.kept.program != cost.program)


def _known(result: Examined) -> Cost | None:
    return result.cost if isinstance(result.cost, Cost) else None
