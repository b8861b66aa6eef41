"""The ways between an SM and the L2 cache, and its shared memory: queues that serve so many bytes a cycle."""

from __future__ import annotations

from tpkernels.gate.clock.machine import Machine


class Bandwidth:
    """Each way is known by the time until which it has work."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.copies = self.loads = self.stores = self.shared = 0.0
        self.landed = 0.0  # bytes of copies whose way into shared memory products have not made room for yet
        self.fetched = self.stored = 0  # bytes in all
        self.copied = 0  # of what is fetched, by the engine

    def copy(self, now: float, size: int) -> float:
        """When a copy by the engine is there."""
        self.fetched += size
        self.copied += size
        self.copies = max(self.copies, now) + size / self.machine.fetch
        return self.copies + self.machine.copy_latency

    def load(self, now: float, size: int) -> float:
        """When L2 has served a warp's load. It passes the engine's queue, and takes of its bandwidth."""
        self.fetched += size
        cycles = size / self.machine.fetch
        self.loads = max(self.loads, now) + cycles
        self.copies = max(self.copies, now) + cycles
        return self.loads

    def put(self, now: float, size: int) -> float:
        """When the engine has read from shared memory what it stores."""
        self.store(now, size)
        return self.stores + self.machine.store_latency

    def store(self, now: float, size: int) -> None:
        self.stored += size
        self.stores = max(self.stores, now) + size / self.machine.store

    def access(self, now: float, cycles: float) -> float:
        """When the shared memory has served a warp."""
        self.shared = max(self.shared, now) + cycles
        return self.shared
