"""A launch of a kernel, run or searched by the machine: all programs of its grid, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from tpkernels.gate.machine.events import Trace
from tpkernels.gate.machine.memory import Written
from tpkernels.gate.machine.orders import EAGER, Emulator, Schedule, search
from tpkernels.gate.machine.rebuild import argument, rebuild
from tpkernels.gate.machine.recorder import Recorder, recording
from tpkernels.kernels import launch
from tpkernels.kernels.target import Target

LaunchGrid = tuple[int, ...]


@dataclass(frozen=True)
class Launched:
    """A kernel with its grid and what it was called with: tensors of the CPU, options such as num_warps."""

    kernel: Any
    grid: LaunchGrid
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def traces(self) -> Iterator[Trace]:
        """What the roles of each program do."""
        grid = (*self.grid, 1, 1)[:3]
        arguments = [argument(each) for each in self.arguments]
        constants = {name: x for name, x in self.constants.items() if name in self.kernel.arg_names}
        function = rebuild(self.kernel)
        for program in product(*map(range, grid)):
            recorder = Recorder(
                program, grid, self.constants.get("num_warps", 4), self.constants.get("num_ctas", 1)
            )
            with recording(recorder):
                for _ in recorder.each_block():
                    function(*arguments, **constants)
            yield recorder.trace()

    def run(self, schedule: Schedule = EAGER) -> None:
        """Write results as a GPU would, in one order of events."""
        written = Written()
        for trace in self.traces():
            Emulator(trace, schedule, written).run()

    def explore(self) -> int:
        """Go through all orders of events in each program; how many states there are."""
        different = {trace.shape(): trace for trace in self.traces()}  # others differ in addresses only
        return sum(map(search, different.values()))


def run(kernel: Any, grid: LaunchGrid, *arguments: Any, schedule: Schedule = EAGER, **constants: Any) -> None:
    """See `Launched.run`."""
    Launched(kernel, grid, arguments, constants).run(schedule)


def explore(kernel: Any, grid: LaunchGrid, *arguments: Any, **constants: Any) -> int:
    """See `Launched.explore`."""
    return Launched(kernel, grid, arguments, constants).explore()


@contextmanager
def emulating(
    schedule: Schedule | None = EAGER, *, processors: int = 2, capability: int = 90
) -> Iterator[list[Launched]]:
    """Launchers on CPU tensors launch as on a GPU of so few processors; Gluon kernels run in the machine.

    Yield the list of launched Gluon kernels; each can be run or explored again. Other
    kernels run in Triton's interpreter.

    schedule: None runs no Gluon kernel, but lists it
    """
    launched: list[Launched] = []

    def start(kernel: Any, grid: LaunchGrid) -> Callable[..., object]:
        if not getattr(kernel, "is_gluon", bool)():
            started: Callable[..., object] = kernel[grid]
            return started
        return partial(_start, kernel, grid)

    def _start(kernel: Any, grid: LaunchGrid, *arguments: Any, **constants: Any) -> None:
        launched.append(Launched(kernel, grid, arguments, constants))
        if schedule:
            launched[-1].run(schedule)

    with launch.emulation(Target("cuda", capability, processors), start):
        yield launched
