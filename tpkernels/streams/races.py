"""Finds unordered accesses to memory, by torch's own tracking of streams and events.

Each program of a kernel that waits counts as a stream of its own: it begins after the tasks before the
kernel, and tasks after the kernel begin after all of its programs. A flag is an event: a writer of the flag
records it, a reader waits for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch.cuda._sanitizer import StreamSynchronizations

from tpkernels.streams.device import MachineError
from tpkernels.streams.program import Span, Step, Task

_Access = tuple[Task, int, int]  # with stream and number, as torch counts them


class Races:
    """Finds races in one execution."""

    def __init__(self, cells: Mapping[Span, range]) -> None:
        """cells: of each span, the ranges of bytes that no task's span splits"""
        self._cells, self._syncs, self._number = cells, StreamSynchronizations(), 0
        self._streams: dict[Hashable, int] = {}
        self._events: dict[Hashable, int] = {}
        self._writes: dict[int, _Access] = {}  # the last write of each cell
        self._reads: dict[int, list[_Access]] = {}  # reads since then

    def begin(self, task: Task) -> None:
        stream = self._stream(task)
        for before in task.after:
            self._acquire(stream, before)
        if _waits(task):
            self._release(stream, ("begun", task.number))
            for program in range(len(task.programs)):
                self._acquire(self._stream(task, program), ("begun", task.number))

    def arrive(self, task: Task) -> None:
        """Release a rank's accesses before a collective to its peers."""
        self._release(self._stream(task), ("arrived", task.number))

    def meet(self, task: Task, sources: Iterable[Task]) -> None:
        """Order a rank's later accesses after those of ranks from which it receives."""
        for source in sources:
            self._acquire(self._stream(task), ("arrived", source.number))

    def step(self, task: Task, program: int, step: Step) -> None:
        """Record a step's accesses; raise if they are not ordered after earlier conflicting accesses."""
        stream = self._stream(task, program if _waits(task) else None)
        for flag, _ in step.awaits:
            self._acquire(stream, ("flag", flag))
        self._number += 1
        self._syncs.update_seq_num(stream, self._number)
        access = task, stream, self._number
        for span in step.reads:
            for cell in self._cells[span]:
                self._require_ordered(access, self._writes.get(cell), span, "reads what")
                self._reads.setdefault(cell, []).append(access)
        for span in step.writes:
            for cell in self._cells[span]:
                reads = self._reads.pop(cell, ())
                for read in reads:
                    self._require_ordered(access, read, span, "writes what", "reads")
                if not reads:
                    self._require_ordered(access, self._writes.get(cell), span, "writes what")
                self._writes[cell] = access

    def raised(self, task: Task, program: int, flags: Sequence[int]) -> None:
        stream = self._stream(task, program if _waits(task) else None)
        for flag in flags:
            self._release(stream, ("flag", flag))

    def end(self, task: Task) -> None:
        stream = self._stream(task)
        if _waits(task):
            for program in range(len(task.programs)):
                self._release(self._stream(task, program), "program")
                self._acquire(stream, "program")
        self._release(stream, task.number)

    def _require_ordered(
        self, access: _Access, before: _Access | None, span: Span, does: str, did: str = "writes"
    ) -> None:
        task, stream, _ = access
        if before is not None and not self._syncs.is_ordered_after(stream, before[2], before[1]):
            raise MachineError(
                f"{task} {does} {before[0]} {did}, in no order: {span[1] - span[0]} bytes at {span[0]:#x}"
            )

    def _stream(self, task: Task, program: int | None = None) -> int:
        key = task.rank, task.stream, program
        if key not in self._streams:
            self._streams[key] = len(self._streams) + 1
        return self._streams[key]

    def _release(self, stream: int, event: Hashable) -> None:
        self._syncs.record_state(self._events.setdefault(event, len(self._events)), stream)

    def _acquire(self, stream: int, event: Hashable) -> None:
        if (number := self._events.get(event)) is not None:
            self._syncs.stream_wait_for_event(stream, number)


def _waits(task: Task) -> bool:
    """Whether programs of a kernel wait for flags, which then order each program by itself."""
    return len(task.programs) > 1 and any(step.awaits for steps in task.programs for step in steps)
