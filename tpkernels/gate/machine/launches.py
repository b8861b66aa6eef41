"""A launch of a kernel, run or searched by the machine: all programs of its grid, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

from tpkernels.gate.machine.emulate import EAGER, Emulator, Schedule
from tpkernels.gate.machine.events import Trace
from tpkernels.gate.machine.global_memory import Written
from tpkernels.gate.machine.rebuild import argument, rebuild
from tpkernels.gate.machine.recorder import Recorder, recording
from tpkernels.gate.machine.search import search
from tpkernels.kernels import launch
from tpkernels.kernels.target import Target

Grid = tuple[int, ...]


def record(kernel: Any, program: Grid, grid: Grid, *arguments: Any, **constants: Any) -> Trace:
    """What the roles of one program do."""
    parameters = {name: value for name, value in constants.items() if name in kernel.arg_names}
    function = rebuild(kernel)
    recorder = Recorder(program, grid, constants.get("num_warps", 4))
    with recording(recorder):
        function(*map(argument, arguments), **parameters)
    return recorder.trace()


def run(kernel: Any, grid: Grid, *arguments: Any, schedule: Schedule = EAGER, **constants: Any) -> None:
    """Launch a kernel on CPU tensors: results are written as a GPU would, in one order of events."""
    grid, written = _padded(grid), Written()
    for program in product(*map(range, grid)):
        Emulator(record(kernel, program, grid, *arguments, **constants), schedule, written).run()


def explore(kernel: Any, grid: Grid, *arguments: Any, **constants: Any) -> int:
    """Go through all orders of events in each program of a launch; how many states there are."""
    grid, states = _padded(grid), 0
    seen = set()
    for program in product(*map(range, grid)):
        trace = record(kernel, program, grid, *arguments, **constants)
        if (shape := _shape(trace)) not in seen:  # others differ in addresses only
            seen.add(shape)
            states += search(trace)
    return states


def _padded(grid: Grid) -> Grid:
    return (*grid, 1, 1)[:3]


def _shape(trace: Trace) -> tuple[Any, ...]:
    return tuple(
        (role.name, *(event.shape() for event in role.events))
        for segment in trace.segments
        for role in segment
    )


@contextmanager
def emulating(
    schedule: Schedule = EAGER, *, processors: int = 2, searched: bool = False
) -> Iterator[list[Any]]:
    """Launchers on CPU tensors launch as on an H100 of so few processors; Gluon kernels run in the machine.

    Others run in Triton's interpreter. Yields the Gluon kernels that were launched.

    searched: go through all orders of each launch, too
    """
    launched: list[Any] = []

    def start(kernel: Any, grid: Grid) -> Callable[..., object]:
        if not getattr(kernel, "is_gluon", bool)():
            started: Callable[..., object] = kernel[grid]
            return started
        launched.append(kernel)
        return partial(_start, kernel, grid)

    def _start(kernel: Any, grid: Grid, *arguments: Any, **constants: Any) -> None:
        if searched:
            explore(kernel, grid, *arguments, **constants)
        run(kernel, grid, *arguments, schedule=schedule, **constants)

    with launch.emulation(Target("cuda", 90, processors), start):
        yield launched
