"""Entries compiled, and on sm_90 clocked: what one of the gate's processes does with each.

Compiling and clocking are kept apart in the user's caches: facts and machine code by what is compiled, cycles
by machine code, launch and the clock's own sources. So an edit of the clock compiles nothing, and an edit of
a kernel clocks that kernel alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tpkernels.gate import clock
from tpkernels.gate.ahead_of_time import DIED, Facts, Job, facts_or_error, machine_code_of
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.launch import Launch
from tpkernels.gate.workers import results_of
from tpkernels.kernels.disk_cache import DiskCache

CYCLES = "cycles"  # of the user's caches


@dataclass(frozen=True, slots=True)
class Task:
    job: Job
    launch: Launch | None  # that is clocked; None: nothing is

    def __str__(self) -> str:
        return str(self.job)


@dataclass(frozen=True, slots=True)
class Examined:
    """What came of a task; a text says in words why there is nothing."""

    facts: Facts | str
    cost: Cost | str | None = None  # None: not clocked


def examine_all(tasks: Sequence[Task], processes: int, report: Callable[[Task], None]) -> list[Examined]:
    """What came of each task; `report` hears of each as it is done."""
    return results_of(examine, tasks, processes, report, Examined(DIED))


def examine(task: Task) -> Examined:
    """Work for one of the processes."""
    facts = facts_or_error(task.job)
    if isinstance(facts, str) or task.launch is None:
        return Examined(facts)
    try:
        return Examined(facts, clocked(task.job, facts, task.launch))
    except Exception as error:  # an instruction that the clock does not know, warps that wait for ever
        return Examined(facts, f"{type(error).__name__}: {error}")


def clocked(job: Job, facts: Facts, launch: Launch) -> Cost:
    """The cost of a launch: from the user's cache, or by the clock and put there."""
    kept = DiskCache.of_user(CYCLES)
    key = f"{facts.cubin} {launch!r} {_clock()}"
    try:
        return Cost.from_json(kept.get(key))
    except TypeError:  # nothing there
        cost = cost_of(machine_code_of(job.entry, job.architecture), launch)
        kept.put(key, cost.as_json())
        return cost


@cache
def _clock() -> str:
    """A hash of the clock's sources."""
    folder = Path(str(clock.__file__)).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(sources).hexdigest()
