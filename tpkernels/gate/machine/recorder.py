"""Runs a kernel's own source once for one program, and lists the events of each of its roles."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tpkernels.gate.machine.events import Multiply, MultiplyWait, Role, Trace, TraceEvent
from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.memory import Allocation, View, assign_cells

MARK = "__machine__"  # a global of every function that runs in the machine
E = TypeVar("E", bound=TraceEvent)


class Recorder:
    """The program that is being recorded."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], num_warps: int) -> None:
        self.program, self.grid, self.num_warps = program, grid, num_warps
        self._events: list[TraceEvent] = []
        self._segments: list[tuple[Role, ...]] = []
        self._allocations: list[Allocation] = []
        self._barriers: dict[tuple[int, int], int] = {}
        self._barrier_names: list[str] = []
        self._count = 0
        self._multiplying: list[int] = []  # the products in flight in this role
        self._specialized = False

    def emit(self, kind: Callable[..., E], *fields: Any) -> E:
        event = kind(self._count, _where(_kernel_frame()), *fields)
        self._count += 1
        self._events.append(event)
        if isinstance(event, Multiply):
            self._multiplying.append(event.number)
        elif isinstance(event, MultiplyWait):
            del self._multiplying[: max(0, len(self._multiplying) - event.pending)]
        return event

    def require_retired(self, number: int) -> None:
        if number in self._multiplying:
            where = _where(_kernel_frame())
            raise Misuse(f"{where}: uses an accumulator that a product in flight still writes")

    def allocate(self, dtype: Any, shape: Sequence[int]) -> View:
        frame = _kernel_frame()
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        assigned = re.match(r"\s*(\w+)\s*=", line)
        name = assigned[1] if assigned else f"shared{len(self._allocations)}"
        same = sum(other.name.partition("#")[0] == name for other in self._allocations)
        name = f"{name}#{same + 1}" if same else name
        self._allocations.append(Allocation(name, dtype, shape))
        return self._allocations[-1].whole

    def barrier(self, view: View) -> int:
        """The number of a barrier."""
        if view.elements.numel() != 1:
            raise Misuse(f"{_where(_kernel_frame())}: expected one barrier, got {view.name} {view.shape}")
        key = self._allocations.index(view.allocation), int(view.elements)
        if key not in self._barriers:
            self._barriers[key] = len(self._barriers)
            self._barrier_names.append(view.name)
        return self._barriers[key]

    def specialize(self, roles: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Any:
        """Record the roles of a segment; the first role returns what the segment does."""
        if self._specialized:
            raise Misuse(f"{_where(_kernel_frame())}: warp_specialize within a role")
        self._close([("main", self._take())])
        self._specialized = True
        results, recorded = [], []
        for number, (function, arguments) in enumerate(roles):
            results.append(function(*arguments))
            recorded.append((f"{function.__name__.strip('_')} {number}", self._take()))
        self._specialized = False
        self._close(recorded)
        return results[0]

    def _take(self) -> tuple[TraceEvent, ...]:
        taken, self._events, self._multiplying = tuple(self._events), [], []
        return taken

    def _close(self, roles: list[tuple[str, tuple[TraceEvent, ...]]]) -> None:
        self._segments.append(tuple(Role(name, events) for name, events in roles))

    def trace(self) -> Trace:
        self._close([("main", self._take())])
        cells = assign_cells(self._allocations)
        segments, names = tuple(self._segments), tuple(self._barrier_names)
        return Trace(segments, names, tuple(cells))


_current: ContextVar[Recorder] = ContextVar("current")


def current() -> Recorder:
    return _current.get()


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)


def _kernel_frame() -> FrameType:
    """Where the kernel is: the innermost frame of a function that runs in the machine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and MARK not in frame.f_globals:
        frame = frame.f_back
    assert frame is not None, "called outside of a kernel"
    return frame


def _where(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def ready_after(product: Multiply) -> Callable[[], None]:
    """For the registers of an accumulator: raises while the product is in flight."""
    recorder = current()
    return lambda: recorder.require_retired(product.number)


def require_like(view: View, shape: Sequence[int], dtype: Any, what: str) -> None:
    if list(view.shape) != list(shape) or view.dtype != dtype:
        where = _where(_kernel_frame())
        raise Misuse(f"{where}: {what} of {list(shape)} {dtype} and {view.name} {view.shape} {view.dtype}")
