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

from triton.experimental.gluon.language.nvidia.hopper.mbarrier import MBarrierLayout

from tpkernels.gate.machine.events import (
    Arrive,
    BlockEnd,
    Multiply,
    MultiplyWait,
    Role,
    Trace,
    TraceEvent,
    Wait,
)
from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.memory import Allocation, View, assign_cells, halves, shape_in_block

MARK = "__machine__"  # a global of every function that runs in the machine
E = TypeVar("E", bound=TraceEvent)


class Recorder:
    """The program that is being recorded: a block, or a pair of blocks, one after the other."""

    def __init__(
        self, program: tuple[int, ...], grid: tuple[int, ...], num_warps: int, blocks: int = 1
    ) -> None:
        self.program, self.grid, self.num_warps, self.blocks = program, grid, num_warps, blocks
        self.block = 0  # that is being recorded
        self._events: list[TraceEvent] = []
        self._segments: list[tuple[Role, ...]] = []
        self._recorded: list[list[tuple[Role, ...]]] = []  # the segments of each block
        self._allocations: list[list[Allocation]] = []  # of all blocks
        self._allocated = 0  # by this block
        self._met = 0  # how often this block has waited for the other
        self._barriers: dict[tuple[int, int], int] = {}
        self._barrier_names: list[str] = []
        self._block_of: list[int | None] = []
        self._meeting = self._own_barrier("the blocks of the pair", None) if blocks > 1 else -1
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

    def each_block(self) -> Iterator[int]:
        """The blocks of the program; the caller runs the kernel for each."""
        for block in range(self.blocks):
            self.block, self._segments, self._allocated, self._met = block, [], 0, 0
            yield block
            self._close([("main", self._take())])
            self._recorded.append(self._segments)

    def acts_on(self, barrier: View) -> bool:
        """Whether this block makes the barrier and waits for it: of one for both, the first does."""
        return self.block == 0 or not self.for_both(barrier)

    def for_both(self, barrier: View) -> bool:
        """Whether the blocks of a pair have one barrier together."""
        return len(barrier.allocation.others) < self.blocks

    def await_blocks(self) -> None:
        """Wait until the other block of a pair is here, too."""
        if self._specialized:
            raise Misuse(f"{_where(_kernel_frame())}: a role waits for the other block: all warps must")
        if self.blocks > 1:
            self.emit(Arrive, self._meeting, 1)
            self.emit(Wait, self._meeting, self._met & 1)
            self._met += 1

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> View:
        number, self._allocated = self._allocated, self._allocated + 1
        if self.block == 0:
            self._allocations.append(self._in_blocks(dtype, shape, layout))
        others = self._allocations[number]
        return others[min(self.block, len(others) - 1)].whole

    def _in_blocks(self, dtype: Any, shape: Sequence[int], layout: Any) -> list[Allocation]:
        """What all blocks allocate; barriers for both lie in the first."""
        name, others = self._name(), list[Allocation]()
        for_both = isinstance(layout, MBarrierLayout) and not any(halves(shape, layout))
        for block in range(1 if for_both else self.blocks):
            of_block = f" of block {block}" if self.blocks > 1 else ""
            Allocation(name + of_block, dtype, shape_in_block(shape, layout), others)
        return others

    def _name(self) -> str:
        frame = _kernel_frame()
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        assigned = re.match(r"\s*(\w+)\s*=", line)
        name = assigned[1] if assigned else f"shared{len(self._allocations)}"
        same = sum(re.split("#| of ", other[0].name)[0] == name for other in self._allocations)
        return f"{name}#{same + 1}" if same else name

    def barrier(self, view: View) -> int:
        """The number of a barrier."""
        if view.elements.numel() != 1:
            raise Misuse(f"{_where(_kernel_frame())}: expected one barrier, got {view.name} {view.shape}")
        key = id(view.allocation), int(view.elements)
        if key not in self._barriers:
            others = view.allocation.others
            self._barriers[key] = self._own_barrier(view.name, others.index(view.allocation))
        return self._barriers[key]

    def _own_barrier(self, name: str, block: int | None) -> int:
        self._barrier_names.append(name)
        self._block_of.append(block)
        return len(self._barrier_names) - 1

    def specialize(self, roles: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Any:
        """Record the roles of a segment; the first role returns what the segment does."""
        if self._specialized:
            raise Misuse(f"{_where(_kernel_frame())}: warp_specialize within a role")
        self.await_blocks()  # Triton has the blocks of a pair wait for each other when barriers are made
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
        allocations = [one for others in self._allocations for one in others]
        if self.blocks == 1:
            cells = assign_cells(allocations)
            return Trace(tuple(self._recorded[0]), tuple(self._barrier_names), tuple(cells))
        roles, arrivals, ends = list[Role](), [(self._meeting, self.blocks)], list[int]()
        for block, segments in enumerate(self._recorded):
            roles += self._of_block(block, segments, arrivals, ends)
        cells = assign_cells(allocations)
        return Trace(
            (tuple(roles),),
            tuple(self._barrier_names),
            tuple(cells),
            tuple(arrivals),
            tuple(ends),
            tuple(self._block_of),
        )

    def _of_block(
        self, block: int, segments: list[tuple[Role, ...]], arrivals: list[tuple[int, int]], ends: list[int]
    ) -> list[Role]:
        """Segments as roles that run at the same time: `main` begins the others, and waits for them."""
        main, workers = list[TraceEvent](), list[Role]()
        for segment in segments:
            if len(segment) == 1:
                main += segment[0].events
                continue
            begin = self._own_barrier(f"the roles of block {block}", None)
            done = self._own_barrier(f"the ends of the roles of block {block}", None)
            arrivals += [(begin, 1), (done, len(segment))]
            main += [self._made(Arrive, begin, 1), self._made(Wait, done, 0)]
            for role in segment:
                events = self._made(Wait, begin, 0), *role.events, self._made(Arrive, done, 1)
                workers.append(Role(f"{role.name} of block {block}", events))
        ends.append(self._own_barrier(f"block {block}", None))
        arrivals.append((ends[-1], 1))
        return [Role(f"main of block {block}", (*main, self._made(BlockEnd, block))), *workers]

    def _made(self, kind: Callable[..., E], *fields: Any) -> E:
        """An event that stands in no kernel."""
        self._count += 1
        return kind(self._count - 1, "roles", *fields)


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
