"""The compile half of `check`: every catalog entry on every architecture, held to rules and budgets.

Compiling runs in processes of its own: in parallel, away from TRITON_INTERPRET, and where a compiler that
dies takes nothing but its own entry along.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from tpkernels.gate.ahead_of_time import CompileError, Facts, facts_of
from tpkernels.gate.budgets import Budgets
from tpkernels.gate.entry import Entry
from tpkernels.gate.expectations import violations
from tpkernels.gate.name_filter import has_parts
from tpkernels.kernels.disk_cache import DiskCache


@dataclass(frozen=True)
class Job:
    entry: Entry
    architecture: str

    def __str__(self) -> str:
        return f"{self.entry.name} on {self.architecture}"


@dataclass(frozen=True)
class Compiled:
    """A job with what came of it."""

    job: Job
    facts: Facts | None  # None if it does not compile
    failures: tuple[str, ...]


def jobs_of(entries: Iterable[Entry], architectures: Sequence[str], only: str) -> list[Job]:
    """Architecture by architecture; `only` as in `has_parts`."""
    chosen = [entry for entry in entries if has_parts(entry.name, only)]
    return [
        Job(entry, architecture)
        for architecture in architectures
        for entry in chosen
        if architecture in entry.architectures
    ]


def compile_all(jobs: Sequence[Job], processes: int, report: Callable[[Job], None]) -> list[Facts | str]:
    """The facts of each job, or in words why there are none; `report` hears of each as it is done."""
    results: dict[int, Facts | str] = {}
    lost: list[int] = []
    with _pool(processes) as pool:
        futures = {pool.submit(_facts_or_error, job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                number = futures[future]
                try:
                    results[number] = future.result()
                    report(jobs[number])
                except BrokenProcessPool:
                    lost.append(number)
        except BaseException:  # leaving the pool would first compile all the rest
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    while lost:  # one died and took the others with it: one at a time shows which
        with _pool(1) as pool:
            while lost:
                number = lost.pop()
                report(jobs[number])
                try:
                    results[number] = pool.submit(_facts_or_error, jobs[number]).result()
                except BrokenProcessPool:
                    results[number] = "the compiler died"
                    break
    return [results[number] for number in range(len(jobs))]


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


def _pool(processes: int) -> ProcessPoolExecutor:
    # spawned, not forked: Triton reads TRITON_INTERPRET on import, and threads do not survive a fork
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_compile_here)


def _compile_here() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: end without a word, one speaks for all


def _facts_or_error(job: Job) -> Facts | str:
    try:
        return facts_of(job.entry, job.architecture, DiskCache.of_user("facts"))
    except CompileError as error:
        return str(error)
    except Exception as error:  # an entry that names no kernel, and the like: a finding about this entry too
        return f"{type(error).__name__}: {error}"
