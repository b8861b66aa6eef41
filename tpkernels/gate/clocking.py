"""Entries compiled, and on sm_90 clocked: what one of the gate's processes does with each.

Compiling and clocking are kept apart in the user's caches: facts and machine code by what is compiled, cycles
by machine code, launch and the clock's own sources. So an edit of the clock compiles nothing, and an edit of
a kernel clocks that kernel alone.

The clock takes longer than the compiler, and gives the same cycles for the same program. So a budget keeps
the cost of a kernel with a hash of its program: what compiles to the same instructions and is launched alike
is not clocked again on any machine.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

from tpkernels.gate import clock
from tpkernels.gate.ahead_of_time import (
    DIED,
    CompileJob,
    Entry,
    Facts,
    facts_kept,
    facts_of_sources,
    facts_together,
    machine_code_of,
)
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.cubin import read
from tpkernels.gate.clock.effects import ClockFault
from tpkernels.gate.clock.launch import Built
from tpkernels.gate.clock.model import KernelPrediction, predict
from tpkernels.gate.clock.workload import Workload
from tpkernels.gate.disk_cache import DiskCache
from tpkernels.gate.workers import results_of

CYCLES = "cycles"  # of the user's caches
TOGETHER = 8  # tasks, whose machine code is disassembled at once


class Launching(Protocol):
    """How a compiled entry is launched. It is sent to processes, and holds nothing that is compiled."""

    def text(self) -> str:
        """What it depends on, to the last argument: the same text stands for the same launch."""

    def workload(self) -> Workload:
        """What is clocked."""


@dataclass(frozen=True, slots=True)
class ClockedJob:
    """A job, and how its kernel is launched to be clocked."""

    job: CompileJob
    launching: Launching | None  # None: it is not clocked
    kept: Cost | None = None  # of its budget

    def __str__(self) -> str:
        return str(self.job)


@dataclass(frozen=True, slots=True)
class Examined:
    """What came of a task; a text says in words why there is nothing."""

    facts: Facts | str
    cost: Cost | str | None = None  # None: not clocked


def examine_all(
    tasks: Sequence[ClockedJob], processes: int, report: Callable[[ClockedJob], None]
) -> list[Examined]:
    """What came of each task; `report` hears of each as it is done. Without any to do, no process starts."""
    known = [remembered(task) for task in tasks]
    for task, found in zip(tasks, known, strict=True):
        if found is not None:
            report(task)
    todo = [number for number, found in enumerate(known) if found is None]
    todo.sort(key=lambda number: tasks[number].launching is None)  # what takes longest comes first
    new = _examined([tasks[number] for number in todo], processes, report)
    results = dict(enumerate(known)) | dict(zip(todo, new, strict=True))
    return [found for found in results.values() if found is not None]


def _examined(
    tasks: Sequence[ClockedJob], processes: int, report: Callable[[ClockedJob], None]
) -> list[Examined]:
    """Some at a time, where there are many; those of a process that died one by one."""
    size = max(1, min(TOGETHER, len(tasks) // (2 * processes)))
    runs = [[*run] for _, run in groupby(tasks, lambda task: task.job.architecture)]
    together = [run[at : at + size] for run in runs for at in range(0, len(run), size)]

    def done(some: Sequence[ClockedJob]) -> None:
        for task in some:
            report(task)

    found: list[list[Examined] | None] = results_of(examine_together, together, processes, done, None)
    lost = [task for some, results in zip(together, found, strict=True) if results is None for task in some]
    alone = iter(results_of(examine, lost, processes, lambda task: None, Examined(DIED)))
    return [
        next(alone) if results is None else results[number]
        for some, results in zip(together, found, strict=True)
        for number in range(len(some))
    ]


def remembered(task: ClockedJob) -> Examined | None:
    """What the user's caches have of a task."""
    entry, launching = task.job.entry, task.launching
    if launching is None and (known := facts_of_sources(entry, task.job.architecture)):
        return Examined(known)
    if entry.folder or entry.module not in sys.modules:  # one that is not ours may do anything on import
        return None
    try:
        facts = facts_kept(entry, task.job.architecture)
        cost = _cost_kept(_cost_key(facts, launching)) if facts and launching else None
    except Exception:  # kernels are interpreted here, or the entry cannot be compiled: `examine` says why
        return None
    return Examined(facts, cost) if facts and (cost or not launching) else None


def examine_together(tasks: Sequence[ClockedJob]) -> list[Examined]:
    """Work for one of the processes: tasks of one architecture."""
    facts = facts_together([task.job for task in tasks])
    return [_with_cost(*pair) for pair in zip(tasks, facts, strict=True)]


def examine(task: ClockedJob) -> Examined:
    return examine_together([task])[0]


def _with_cost(task: ClockedJob, facts: Facts | str) -> Examined:
    if isinstance(facts, str) or task.launching is None:
        return Examined(facts)
    try:
        return Examined(facts, clocked(task, facts, task.launching))
    except Exception as error:  # an instruction that the clock does not know, warps that wait for ever
        return Examined(facts, f"{type(error).__name__}: {error}")


def clocked(task: ClockedJob, facts: Facts, launching: Launching) -> Cost:
    """The cost of an entry: of the user's cache, of its budget for the same program, or by the clock."""
    key = _cost_key(facts, launching)
    cost = _cost_kept(key)
    if cost is None:
        compiled = built(task.job.entry, task.job.architecture, facts)
        program = hashlib.sha256(f"{compiled!r} {launching.text()} {_clock()}".encode()).hexdigest()[:16]
        if task.kept is not None and task.kept.program == program:
            cost = task.kept
        else:
            cost = replace(cost_of(compiled, launching.workload()), program=program)
        DiskCache.of_user(CYCLES).put(key, cost.as_json())
    return cost


@dataclass(frozen=True, slots=True)
class Predicted:
    """An entry with the cost of its kernel, and what the model makes of its launch."""

    entry: str
    cost: Cost
    model: KernelPrediction


def predicted(task: ClockedJob) -> Predicted | str:
    """Compile and clock a kernel in this process, and predict its launch; an error text if that fails."""
    found = examine(task)
    if isinstance(found.facts, str):
        return f"does not compile: {found.facts}"
    if not isinstance(found.cost, Cost) or task.launching is None:
        return str(found.cost)
    try:
        model = predict(found.cost, task.launching.workload())
    except ClockFault as error:
        return f"{type(error).__name__}: {error}"
    return Predicted(task.job.entry.name, found.cost, model)


def _cost_key(facts: Facts, launching: Launching) -> str:
    return f"{facts.cubin} {launching.text()} {_clock()}"


def _cost_kept(key: str) -> Cost | None:
    try:
        return Cost.from_json(DiskCache.of_user(CYCLES).get(key))
    except TypeError:  # nothing there
        return None


def built(entry: Entry, architecture: str, facts: Facts) -> Built:
    """What was compiled of an entry, for the clock to launch."""
    return Built(read(machine_code_of(entry, architecture)), facts.threads // 32, facts.shared)


@cache
def _clock() -> str:
    """A hash of the clock's sources."""
    folder = Path(str(clock.__file__)).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(sources).hexdigest()
