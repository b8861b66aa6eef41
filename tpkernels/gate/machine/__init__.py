"""A machine that runs warp-specialised Gluon kernels on the CPU, and goes through all their interleavings.

Triton's interpreter does not run Gluon. Here the kernel's own source runs: `rebuild` gives its functions
other globals, `recorder` runs them once and lists what each role does to barriers and shared memory, and then

    machine.run(kernel, grid, ..., schedule=...)    computes, in one order of events
    machine.explore(kernel, grid, ...)              goes through all orders
    machine.emulating(processors=2)                 has launchers on CPU tensors run their kernels here
    machine.mutants(trace), machine.edited(...)     plant faults in what was recorded, and in source

Each raises a `Fault` for a deadlock, a race, a misused barrier, or what is still in flight at the end.
"""

from __future__ import annotations

from tpkernels.gate.machine.emulate import EAGER, SCHEDULES, Schedule
from tpkernels.gate.machine.faults import Deadlock, Fault, Misuse, Race, Undrained
from tpkernels.gate.machine.interleavings import expectations, search
from tpkernels.gate.machine.launches import Launched, emulating, explore, run
from tpkernels.gate.machine.planted import Mutant, mutants
from tpkernels.gate.machine.rebuild import edited

__all__ = [
    "EAGER",
    "SCHEDULES",
    "Deadlock",
    "Fault",
    "Launched",
    "Misuse",
    "Mutant",
    "Race",
    "Schedule",
    "Undrained",
    "edited",
    "emulating",
    "expectations",
    "explore",
    "mutants",
    "run",
    "search",
]
