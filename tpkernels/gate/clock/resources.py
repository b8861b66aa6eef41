"""One Hopper SM in numbers, and what all its warps share: ways to the L2 cache, shared memory, tensor cores.

Ways and memory are queues that serve so many bytes a cycle. Products of warp groups come in order, one at a
time, each by all four tensor cores.
"""

from __future__ import annotations

# Cycles of the SM's clock, bytes a cycle. "Fitted": to the published timings that docs/clock.md has.
FETCH = 40.0  # from L2, when all SMs ask: fitted; A100's published 5120 / 132 would be 38.8
STORE = 96.0  # to L2: fitted, weakly determined
SHARED = 128.0  # through shared memory: data sheet
COPY_LATENCY = 550.0  # of the copy engine, hits and misses of L2 mixed: fitted
LOAD_LATENCY = 550.0  # of LDG and LDGSTS, mixed alike: fitted
ATOMIC_LATENCY = 700.0  # assumed: a load that the L2 must also compute
GPU_FENCE = 700.0  # until the GPU sees what was stored: assumed, as an atomic
SYSTEM_FENCE = 1500.0  # until all of the machine does, peers' memory aside: assumed
STORE_LATENCY = 300.0  # until the copy engine has read what it stores: fitted, weakly determined
BARRIER = 22.0  # from the last arrival at a BAR.SYNC to those who wait: micro-benchmarks
POLL = 20.0  # from the end of an mbarrier's phase to those who wait: assumed
DRAIN = 60.0  # from a product's end to a warp that waits for it: assumed
FILL = 8.0  # from a product's issue to its start: assumed
PRODUCTS_QUEUED = 4  # that a warp may have waiting: fitted, fewer fit worse
SHARED_QUEUED = 64.0  # cycles of accesses waiting for shared memory before a warp stalls: assumed
MEMORY_QUEUED = 2000.0  # cycles of accesses waiting for L2 before a warp stalls: assumed
HMMA = 6.5  # of a 16x8x16 product of the older kind: 62 % of the peak, published
FIRST_BLOCK = 40.0  # between the starts of blocks that become resident together: assumed
NEXT_BLOCK = 300.0  # from the end of a block to the start of its successor: assumed
FLOPS = 4096  # of 16-bit operands: 989.4 TFLOP/s over 132 SMs at 1.83 GHz; of 8 bits twice as many
GROUP = 4  # warps


class Bandwidth:
    """Each way is known by the time until which it has work."""

    def __init__(self) -> None:
        self.copies = self.loads = self.stores = self.shared = 0.0
        self.landed = 0.0  # bytes of copies whose way into shared memory products have not made room for yet
        self.fetched = self.stored = 0  # bytes in all
        self.copied = 0  # of what is fetched, by the engine

    def copy(self, now: float, size: int) -> float:
        """When a copy by the engine is there."""
        self.fetched += size
        self.copied += size
        self.copies = max(self.copies, now) + size / FETCH
        return self.copies + COPY_LATENCY

    def load(self, now: float, size: int) -> float:
        """When L2 has served a warp's load. It passes the engine's queue, and takes of its bandwidth."""
        self.fetched += size
        self.loads = max(self.loads, now) + size / FETCH
        self.copies = max(self.copies, now) + size / FETCH
        return self.loads

    def store(self, now: float, size: int) -> None:
        self.stored += size
        self.stores = max(self.stores, now) + size / STORE

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
    def __init__(self, bandwidth: Bandwidth) -> None:
        self.bandwidth = bandwidth
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
        begin = max(now + FILL, *self.free)
        # Copies land meanwhile, as fast as L2 gives; together they may take longer than the product.
        landing = min(self.bandwidth.landed, FETCH * ideal)
        self.bandwidth.landed -= landing
        end = begin + max(ideal, (read + landing) / SHARED)
        self.free = [end] * 4
        self.busy += ideal
        group.begins.append(begin)
        group.ends.append(end)
        return True

    def issue_alone(self, now: float, scheduler: int) -> float:
        """A product of one warp, of the older kind (HMMA); when it starts."""
        begin = max(now, self.free[scheduler])
        self.free[scheduler] = begin + HMMA
        self.busy += 1.0  # 4 cycles at full speed, of one of four tensor cores
        return begin
