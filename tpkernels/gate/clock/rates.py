"""One Hopper SM in numbers: what it moves and computes a cycle."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SmRates:
    """Cycles of the SM's clock, bytes a cycle. "Fitted": to the published timings that docs/clock.md has."""

    fetch: float = 40.0  # from L2, when all SMs ask: fitted; A100's published 5120 / 132 would be 38.8
    store: float = 96.0  # to L2: fitted, weakly determined
    memory: float = math.inf  # to and from memory, stores and loads together; inf: all of it is in L2
    shared: float = 128.0  # through shared memory: data sheet
    copy_latency: float = 550.0  # of the copy engine, hits and misses of L2 mixed: fitted
    load_latency: float = 550.0  # of LDG and LDGSTS, mixed alike: fitted
    atomic_latency: float = 700.0  # assumed: a load that the L2 must also compute
    gpu_fence: float = 700.0  # until the GPU sees what was stored: assumed, as an atomic
    system_fence: float = 1500.0  # until all of the machine does, peers' memory aside: assumed
    store_latency: float = 300.0  # until the copy engine has read what it stores: fitted, weakly determined
    barrier: float = 22.0  # from the last arrival at a BAR.SYNC to those who wait: micro-benchmarks
    poll: float = 20.0  # from the end of an mbarrier's phase to those who wait: assumed
    remote: float = (
        200.0  # from an arrival at another block's barrier to its count: micro-benchmarks, 181 to 213
    )
    drain: float = 60.0  # from a product's end to a warp that waits for it: assumed
    fill: float = 8.0  # from a product's issue to its start: assumed
    products_queued: int = 4  # that a warp may have waiting: fitted, fewer fit worse
    shared_queued: float = 64.0  # cycles of accesses waiting for shared memory before a warp stalls: assumed
    memory_queued: float = 2000.0  # cycles of accesses waiting for L2 before a warp stalls: assumed
    hmma: float = 6.5  # of a 16x8x16 product of the older kind: 62 % of the peak, published
    first_block: float = 40.0  # between the starts of blocks that become resident together: assumed
    next_block: float = 300.0  # from the end of a block to the start of its successor: assumed
