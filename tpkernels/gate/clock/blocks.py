"""The state of warps and blocks, without values in registers: what they wait for, and who waits for them.

Warps of a block meet at its barrier, and at mbarriers, which lie in shared memory and count bytes, too.
"""

from __future__ import annotations

from collections import deque

from tpkernels.gate.clock.effects import ClockFault
from tpkernels.gate.clock.resources import GROUP, WarpGroup
from tpkernels.gate.clock.table import Operation
from tpkernels.gate.clock.values import WarpState

SCOREBOARDS = 6


class Warp:
    def __init__(
        self, block: ThreadBlock, number: int, scheduler: int, state: WarpState, start: float
    ) -> None:
        self.block, self.number, self.scheduler, self.state = block, number, scheduler, state
        self.at = 0  # index of the next step
        self.ready = start
        self.done = [-1.0] * SCOREBOARDS  # when all that was issued on a scoreboard is done; -1: nothing was
        self.causes = [""] * SCOREBOARDS  # opcode whose end that is
        self.issued = [0.0] * SCOREBOARDS  # when that was issued
        self.stalls: dict[str, float] = {}
        # Copies in groups that were committed: when done, when issued, opcode.
        self.groups: deque[tuple[float, float, str]] = deque()
        self.open = (0.0, 0.0, "")  # of the copies since then
        self.closed: list[int] = []  # the last product of each group of products
        self.group: WarpGroup = block.groups[number // GROUP]
        self.member = number % GROUP
        self.last_wait = -1.0  # end of the last wait for a load or a copy
        self.parked = ""  # what it waits for, if nobody knows yet when that comes
        self.awaits: object = None  # the same, to be named in a deadlock's message
        self.since = 0.0  # it waits
        self.paused: Operation | None = None  # with which it waits
        self.issuing = 0.0  # cycles of stall counts

    def hold(self, scoreboard: int, done: float, opcode: str, now: float) -> None:
        """Until then, with what else was issued on this scoreboard."""
        if done >= self.done[scoreboard]:
            self.done[scoreboard], self.causes[scoreboard], self.issued[scoreboard] = done, opcode, now

    def __str__(self) -> str:
        return f"block {self.block.number} warp {self.number}"


class ThreadBlock:
    def __init__(self, number: int, slot: int, warps: int) -> None:
        self.number, self.slot, self.running = number, slot, warps
        self.mbarriers: dict[int, Mbarrier] = {}
        self.waiting: list[Warp] = []  # at the block's barrier
        self.groups = [WarpGroup() for _ in range(-(-warps // GROUP))]
        self.warps: list[Warp] = []

    def mbarrier(self, address: int | None) -> Mbarrier:
        if address is None:
            raise ClockFault("an mbarrier is used of which the address is unknown")
        if address not in self.mbarriers:
            made = ", ".join(f"{known:#x}" for known in sorted(self.mbarriers)) or "none"
            raise ClockFault(f"no mbarrier at {address:#x}; there are: {made}")
        return self.mbarriers[address]


class Mbarrier:
    """Phase n is over once `count` arrivals came, and all bytes that they expect."""

    def __init__(self, address: int, count: int) -> None:
        self.address, self.count = address, count
        self.pending = count
        self.bytes = 0  # expected and not here yet
        self.phase = 0  # phases that are over
        self.copied = -1.0  # when the copy was issued that ended the last phase; -1: an arrival ended it

    def over(self, parity: int) -> bool:
        """Is the phase of this parity over? A fresh mbarrier says so of parity 1."""
        return self.phase & 1 != parity

    def arrive(self, count: int, expected: int) -> bool:
        """Whether this ends the phase."""
        if count > self.pending:
            raise ClockFault(f"{count} more arrivals at {self}")
        self.pending -= count
        self.bytes += expected
        return self._end(-1.0)

    def complete(self, arrived: int, issued: float) -> bool:
        """Bytes of a copy that was issued then; whether they end the phase."""
        if arrived > self.bytes:
            raise ClockFault(f"a copy brings {arrived} bytes to {self}")
        self.bytes -= arrived
        return self._end(issued)

    def _end(self, issued: float) -> bool:
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.count
        self.copied = issued
        return True

    def __str__(self) -> str:
        awaits = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes"
        return f"mbarrier {self.address:#x}, whose phase {self.phase} awaits {awaits}"
