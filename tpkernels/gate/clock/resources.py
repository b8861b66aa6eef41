"""What all warps of an SM share: ways to the L2 cache, shared memory, tensor cores.

Ways and memory are queues that serve so many bytes a cycle. Products of warp groups come in order, one at a
time, each by all four tensor cores.
"""

from __future__ import annotations

from tpkernels.gate.clock.rates import SmRates

GROUP = 4  # warps


class Bandwidth:
    """Each way is known by the time until which it has work."""

    def __init__(self, machine: SmRates) -> None:
        self.machine = machine
        self.copies = self.loads = self.stores = self.memory = self.shared = 0.0
        self.landed = 0.0  # bytes of copies whose way into shared memory products have not made room for yet
        self.fetched = self.stored = 0  # bytes in all
        self.copied = 0  # of what is fetched, by the engine

    def copy(self, now: float, size: int, blocks: int = 1) -> float:
        """When a copy by the engine is there. Into several blocks L2 serves it once, for a share of each."""
        share = size // blocks
        self.fetched += share
        self.copied += size
        self.copies = max(self.copies, now) + share / self.machine.fetch
        return max(self.copies, self._from_memory(now, share)) + self.machine.copy_latency

    def load(self, now: float, size: int) -> float:
        """When L2 has served a warp's load. It passes the engine's queue, and takes of its bandwidth."""
        self.fetched += size
        cycles = size / self.machine.fetch
        self.loads = max(self.loads, now) + cycles
        self.copies = max(self.copies, now) + cycles
        return max(self.loads, self._from_memory(now, size))

    def put(self, now: float, size: int) -> float:
        """When the engine has read from shared memory what it stores."""
        self.store(now, size)
        return self.stores + self.machine.store_latency

    def store(self, now: float, size: int) -> None:
        self.stored += size
        self.stores = max(self.stores, now) + size / self.machine.store
        self._from_memory(now, size)  # L2 takes it at once, but later loads come behind it

    def _from_memory(self, now: float, size: int) -> float:
        self.memory = max(self.memory, now) + size / self.machine.memory
        return self.memory

    def access(self, now: float, cycles: float) -> float:
        """When the shared memory has served a warp."""
        self.shared = max(self.shared, now) + cycles
        return self.shared


class WarpGroup:
    """A product starts once all four warps have issued it."""

    def __init__(self) -> None:
        self.issued = [0] * GROUP
        self.begins: list[float] = []
        self.ends: list[float] = []


class TensorCores:
    def __init__(self, machine: SmRates, bandwidth: Bandwidth) -> None:
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
