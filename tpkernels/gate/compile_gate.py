"""The compile gate: every entry on each of its architectures, held to rules and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import triton

from tpkernels.gate import expectations
from tpkernels.gate.ahead_of_time import ARCHITECTURES, CompileJob, Entry, Facts, compile_all
from tpkernels.gate.causes import Change
from tpkernels.gate.expectations import Budgets
from tpkernels.gate.rules import violations


@dataclass(frozen=True)
class Compiled:
    """A job with what came of it."""

    job: CompileJob
    facts: Facts | None  # None if it does not compile
    faults: tuple[str, ...] = ()  # whatever the budgets
    changes: tuple[Change, ...] = ()  # against the budget

    @property
    def failures(self) -> tuple[str, ...]:
        return (*self.faults, *map(str, self.changes))


class Checked(NamedTuple):
    """All jobs, and what is to be said of the table of budgets."""

    compiled: list[Compiled]
    notes: list[str]
    absent: list[str]  # budgets that there are none of, which is a failure


class UsageError(Exception):
    """What nothing can be checked with, in words."""


@dataclass(frozen=True)
class Suite:
    """Entries that are checked together."""

    name: str
    entries: Mapping[str, Entry]  # by name
    budgets: Path


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
    report: Callable[[CompileJob], None],
    update: bool,
    allow_no_budgets: bool = False,
) -> Checked:
    """Compile the jobs, and compare them with rules and budgets.

    report: hears of each job as it is done
    update: make what the jobs take the budgets, and write them
    allow_no_budgets: where there are none for this Triton or architecture, rules suffice
    """
    try:
        table = expectations.read(suite.budgets)
    except ValueError as error:
        raise UsageError(str(error)) from error
    minor, notes = expectations.minor_version(triton.__version__), list[str]()
    absent = list[str]()
    before = table.get(minor, Budgets())
    results = compile_all(jobs, processes, report)
    current = {(gpu, name) for name, entry in suite.entries.items() for gpu in entry.architectures}
    if update:
        new = {
            (job.architecture, job.entry.name): expectations.kept(result)
            for job, result in zip(jobs, results, strict=True)
            if isinstance(result, Facts)
        }
        provenance = {"triton": triton.__version__, "date": date.today().isoformat(), "by": "check --update"}
        table[minor] = expectations.updated(table.get(minor), new, current, provenance)
        try:
            expectations.write(table, suite.budgets)
        except OSError as error:
            raise UsageError(f"cannot write the budgets: {error}") from error
        notes.append(f"{len(new)} budgets for Triton {minor} written into {suite.budgets}")
    else:
        unheld = [
            a for a in dict.fromkeys(job.architecture for job in jobs) if not _holds(table.get(minor), a)
        ]
        if unheld:
            known = ", ".join(sorted(table)) or "none"
            absent.append(
                f"no budgets for Triton {minor} on {', '.join(unheld)} (some for Triton {known}), "
                "so nothing tells a slower kernel: install the Triton of the budgets, or write some with "
                "--update; --allow-no-budgets checks by rules alone"
            )
        elif (written := before.provenance.get("triton")) not in (None, triton.__version__):
            notes.append(
                f"budgets are of Triton {written}, and this is {triton.__version__}: only worse code fails"
            )
        if gone := before.keys() - current:
            notes.append(f"{len(gone)} budgets of what is no longer in {suite.name}: --update drops them")
        if allow_no_budgets:
            notes, absent = notes + absent, []
    found = table.get(minor)
    judged = [judge(*pair, found, triton.__version__) for pair in zip(jobs, results, strict=True)]
    return Checked(judged, notes, absent)


def _holds(budgets: Budgets | None, architecture: str) -> bool:
    return budgets is not None and budgets.hold(architecture)


def judge(job: CompileJob, result: Facts | str, budgets: Budgets | None, triton_version: str) -> Compiled:
    """Hold a result to the rules of its entry, and to its budget.

    Without a table of this Triton for this architecture there are the rules alone.
    """
    if isinstance(result, str):
        return Compiled(job, None, (f"does not compile: {result}",))
    found = list[Change]()
    if budgets is not None and budgets.hold(job.architecture):
        budget = budgets.of(job.architecture, job.entry.name)
        same = budgets.provenance.get("triton") == triton_version
        if budget is None:
            found.append(Change("budget", "no budget yet", "worse"))
        else:
            found += expectations.failures(budget, result, job.architecture, same)
    return Compiled(job, result, (*violations(job.entry.rules, job.architecture, result),), tuple(found))
