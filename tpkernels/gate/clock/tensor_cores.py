"""Products of warp groups: in order, one at a time, each by all four tensor cores."""

from __future__ import annotations

from tpkernels.gate.clock.bandwidth import Bandwidth
from tpkernels.gate.clock.machine import Machine

GROUP = 4  # warps


class WarpGroup:
    """A product starts once all four warps have issued it."""

    def __init__(self) -> None:
        self.issued = [0] * GROUP
        self.begins: list[float] = []
        self.ends: list[float] = []


class TensorCores:
    def __init__(self, machine: Machine, bandwidth: Bandwidth) -> None:
        self.machine, self.bandwidth = machine, bandwidth
        self.free = [0.0] * 4  # of each scheduler
        self.busy = 0.0  # cycles of products at their full speed

    def issue(self, now: float, group: WarpGroup, member: int, ideal: float, read: float) -> bool:
        """One warp of the group issues its product; whether that starts it.

        ideal: cycles at full speed; read: bytes of its operands in shared memory
        """
        issued, product = group.issued, group.issued[member]
        issued[member] = product + 1
        if min(issued) <= product:
            return False
        begin = max(now + self.machine.fill, *self.free)
        # Copies land meanwhile, as fast as L2 gives; together they may take longer than the product.
        landing = min(self.bandwidth.landed, self.machine.fetch * ideal)
        self.bandwidth.landed -= landing
        end = begin + max(ideal, (read + landing) / self.machine.shared)
        self.free = [end] * 4
        self.busy += ideal
        group.begins.append(begin)
        group.ends.append(end)
        return True

    def issue_alone(self, now: float, scheduler: int) -> float:
        """A product of one warp, of the older kind (HMMA); when it starts."""
        begin = max(now, self.free[scheduler])
        self.free[scheduler] = begin + self.machine.hmma
        self.busy += 1.0  # 4 cycles at full speed, of one of four tensor cores
        return begin
