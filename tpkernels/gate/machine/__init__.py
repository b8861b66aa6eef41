"""A machine that runs warp-specialised Gluon kernels on the CPU, and goes through all their interleavings.

Triton's interpreter does not run Gluon. Here the kernel's own source runs: `rebuild` gives its functions
other globals, `recorder` runs them once and lists what each role does to barriers and shared memory, and then

    machine.run(kernel, grid, ..., schedule=...)    computes, in one order of events
    machine.explore(kernel, grid, ...)              goes through all orders
    machine.emulating(processors=2)                 has launchers on CPU tensors run their kernels here

Each raises a `Fault` for a deadlock, a race, a misused barrier, or what is still in flight at the end.
"""

from __future__ import annotations

from tpkernels.gate.machine.faults import Deadlock, Fault, Misuse, Race, Undrained
from tpkernels.gate.machine.launches import Launched, emulating, explore, run
from tpkernels.gate.machine.orders import EAGER, SCHEDULES, Schedule, expectations, search

__all__ = [
    "EAGER",
    "SCHEDULES",
    "Deadlock",
    "Fault",
    "Launched",
    "Misuse",
    "Race",
    "Schedule",
    "Undrained",
    "emulating",
    "expectations",
    "explore",
    "run",
    "search",
]
