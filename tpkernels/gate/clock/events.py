"""What comes next on an SM, and warps that wait for something of which nobody knows yet when it comes."""

from __future__ import annotations

import heapq
import math
from itertools import count

from tpkernels.gate.clock.blocks import Warp
from tpkernels.gate.clock.mbarriers import Mbarrier
from tpkernels.gate.clock.operations import Operation
from tpkernels.gate.clock.timeline import Mark, Recorder, Wait

NOBODY_KNOWS = math.inf


class Landing:
    """Bytes of a copy on their way to an mbarrier."""

    def __init__(self, mbarrier: Mbarrier, size: int, issued: float) -> None:
        self.mbarrier, self.bytes, self.issued = mbarrier, size, issued


class Events:
    def __init__(self, recorder: Recorder) -> None:
        self.heap: list[tuple[float, int, Warp | Landing]] = []
        self.recorder = recorder
        self.order = count().__next__  # of what happens at the same time

    def push(self, when: float, event: Warp | Landing) -> None:
        heapq.heappush(self.heap, (when, self.order(), event))

    def park(self, warp: Warp, operation: Operation, now: float, cause: str, awaits: object) -> float:
        """The warp is in no queue until somebody wakes it."""
        warp.paused, warp.parked, warp.awaits, warp.since = operation, cause, awaits, now
        return NOBODY_KNOWS

    def wake(self, warp: Warp, when: float) -> None:
        self.stalled(warp, warp.since, when, warp.parked)
        warp.paused = None
        self.push(when, warp)

    def stalled(self, warp: Warp, start: float, end: float, cause: str) -> None:
        warp.stalls[cause] = warp.stalls.get(cause, 0.0) + end - start
        self.recorder.stalled(warp.block.number, warp.number, start, end, cause)

    def loaded(self, warp: Warp, start: float, end: float, what: str, index: int, issued: float) -> None:
        """The warp has waited for a load or a copy that was issued then."""
        serial = 0.0 <= warp.last_wait <= issued
        self.recorder.waits.append(
            Wait(warp.block.number, warp.number, start, end, what, index, issued, serial)
        )
        warp.last_wait = end

    def mark(self, warp: Warp, opcode: str, now: float, index: int) -> None:
        self.recorder.marks.append(Mark(warp.block.number, warp.number, now, opcode, index))

    def close_epilogue(self, warp: Warp, now: float) -> None:
        """From having all its products to its next one a warp is in the epilogue, if it stores anything."""
        if warp.drained >= 0.0 and warp.stores:
            self.recorder.span(warp.block.number, warp.number, "epilogue", warp.drained, now, "")
        warp.drained = -1.0
