"""What an instruction does on an SM beyond its issue: where it queues, what its effect changes.

Of what queues the code alone says what it does (`limits`, `issues`); effects depend on values (`reactions`).
Both say when the instruction's scoreboard is released: NOBODY_KNOWS if the warp waits for something whose
time is not known yet.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import count, islice
from typing import Any

from tpkernels.gate.clock import effects
from tpkernels.gate.clock.blocks import Mbarrier, ThreadBlock, Warp
from tpkernels.gate.clock.effects import ClockFault
from tpkernels.gate.clock.resources import (
    BARRIER,
    DRAIN,
    GROUP,
    LOAD_LATENCY,
    MEMORY_QUEUED,
    POLL,
    PRODUCTS_QUEUED,
    SHARED,
    SHARED_QUEUED,
    STORE_LATENCY,
    Bandwidth,
    TensorCores,
    WarpGroup,
)
from tpkernels.gate.clock.table import OpcodeKind, Operation

NOBODY_KNOWS = math.inf
SECTOR = 32  # bytes
LOADS = ("LDG", "LDGSTS", "UTMALDG")
_STORES = {"STG", "ST", "RED", "REDG"}


class CopyInFlight:
    """Bytes of a copy on their way to an mbarrier."""

    def __init__(self, mbarrier: Mbarrier, size: int, issued: float) -> None:
        self.mbarrier, self.bytes, self.issued = mbarrier, size, issued


class Sm:
    """boxes: bytes that a copy moves, by its descriptor"""

    def __init__(self, boxes: Mapping[int, int]) -> None:
        self.boxes = boxes
        self.multiply: set[int] = set()  # warps of a block that issue products
        # loads by warp of a block, each issued only after the wait for the one before had ended
        self.serial_loads: defaultdict[int, int] = defaultdict(int)
        self.bandwidth = Bandwidth()
        self.tensor_cores = TensorCores(self.bandwidth)
        self.heap: list[tuple[float, int, Warp | CopyInFlight]] = []  # what comes next
        self.order = count().__next__  # of what happens at the same time
        # warps that wait until a product of their group starts, and so is known to end
        self.awaiting_product: defaultdict[WarpGroup, list[Warp]] = defaultdict(list)
        self.awaiting_phase: defaultdict[Mbarrier, list[Warp]] = defaultdict(list)
        does = {
            OpcodeKind.PLAIN: (self._no_limit, self._issue),
            OpcodeKind.ACCESS: (self._shared, self._access),
            OpcodeKind.PRODUCT: (self._room, self._product),
            OpcodeKind.PRODUCT_ALONE: (self._no_limit, self._product_alone),
            OpcodeKind.AWAIT_PRODUCTS: (self._products, self._issue),
            OpcodeKind.COMMIT: (self._no_limit, self._commit),
            OpcodeKind.AWAIT_GROUPS: (self._groups, self._have_groups),
            OpcodeKind.GLOBAL: (self._memory, self._issue),
            OpcodeKind.FENCE: (self._no_limit, self._fence),
        }
        # by kind, in rows, for they are looked up at each instruction: when one that is not issued yet may
        # issue, and what it waits for; then what issues it, and says when its scoreboard is released
        self.limits, self.issues = zip(*(does[kind] for kind in OpcodeKind), strict=True)
        self.reactions: dict[type, Callable[[Warp, Operation, Any, float], float]] = {
            effects.Jump: self._jump,
            effects.BarrierSync: self._sync,
            effects.InitMbarrier: self._make,
            effects.Arrive: self._arrive,
            effects.AwaitPhase: self._await,
            effects.Copy: self._copy,
            effects.Put: self._put,
            effects.Global: self._global,
            effects.Local: self._local,
        }

    def push(self, when: float, event: Warp | CopyInFlight) -> None:
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

    def loaded(self, warp: Warp, end: float, what: str, issued: float) -> None:
        """The warp has waited for a load, an atomic or a copy that was issued then."""
        self.serial_loads[warp.number] += what in LOADS and 0.0 <= warp.last_wait <= issued
        warp.last_wait = end

    def _no_limit(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        return 0.0, ""

    def _shared(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        return self.bandwidth.shared - SHARED_QUEUED, "shared memory"

    def _memory(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        way = self.bandwidth.stores if operation.opcode in _STORES else self.bandwidth.loads
        return way - MEMORY_QUEUED, "memory"

    def _issue(self, warp: Warp, operation: Operation, now: float) -> float:
        return now + operation.latency

    def _access(self, warp: Warp, operation: Operation, now: float) -> float:
        return self.bandwidth.access(now, operation.shared) + operation.latency

    def _product_alone(self, warp: Warp, operation: Operation, now: float) -> float:
        begin = self.tensor_cores.issue_alone(now, warp.scheduler)
        warp.ready = max(warp.ready, begin)
        self.multiply.add(warp.number)
        return begin + operation.latency

    def _fence(self, warp: Warp, operation: Operation, now: float) -> float:
        """The warp goes on when what was stored has left the SM and is seen."""
        done = max(now, self.bandwidth.stores) + operation.latency
        self.stalled(warp, now + operation.stall, done, "memory fence")
        warp.ready = max(warp.ready, done)
        return done

    def _commit(self, warp: Warp, operation: Operation, now: float) -> float:
        warp.groups.append(warp.open)
        warp.open = (0.0, 0.0, "")
        return now + operation.latency

    def _have_groups(self, warp: Warp, operation: Operation, now: float) -> float:
        while len(warp.groups) > operation.pending:
            warp.groups.popleft()
        return now + operation.latency

    def _room(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        before = warp.group.issued[warp.member] - PRODUCTS_QUEUED
        if before < 0:
            return 0.0, ""
        if before < len(warp.group.begins):
            return warp.group.begins[before], "tensor cores full"
        return self._await_product(warp, operation, now, before)

    def _products(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        if len(warp.closed) <= operation.pending:
            return 0.0, ""
        last = warp.closed[-operation.pending - 1]
        if last < len(warp.group.ends):
            return warp.group.ends[last] + DRAIN, "products"
        return self._await_product(warp, operation, now, last)

    def _await_product(self, warp: Warp, operation: Operation, now: float, product: int) -> tuple[float, str]:
        self.awaiting_product[warp.group].append(warp)
        awaits = f"product {product}, which not all {GROUP} warps of its group have issued"
        return self.park(warp, operation, now, "products", awaits), "products"

    def _groups(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        awaited = len(warp.groups) - operation.pending
        if awaited <= 0:
            return 0.0, ""
        done, issued, opcode = max(islice(warp.groups, awaited))
        if opcode != "LDGSTS":
            return done, "stores"
        if done > now:
            self.loaded(warp, done, opcode, issued)
        return done, "copies"

    def _product(self, warp: Warp, operation: Operation, now: float) -> float:
        group = warp.group
        if operation.closes:
            warp.closed.append(group.issued[warp.member])
        self.multiply.add(warp.number)
        if self.tensor_cores.issue(now, group, warp.member, operation.ideal, operation.read):
            for waiting in self.awaiting_product.pop(group, ()):
                self.wake(waiting, now)
        return now + operation.latency

    def release(self, block: ThreadBlock, now: float) -> None:
        """Lets those go on who wait at the block's barrier, if all have arrived."""
        if len(block.waiting) == block.running:
            waiting, block.waiting = block.waiting, []
            for warp in waiting:
                self._resume(warp, now + BARRIER, max(warp.ready, now + BARRIER))

    def land(self, landing: CopyInFlight, now: float) -> None:
        self.bandwidth.landed += landing.bytes
        if landing.mbarrier.complete(landing.bytes, landing.issued):
            self._over(landing.mbarrier, now)

    def _jump(self, warp: Warp, operation: Operation, effect: effects.Jump, now: float) -> float:
        warp.at = effect.index
        return now + operation.latency

    def _sync(self, warp: Warp, operation: Operation, effect: effects.BarrierSync, now: float) -> float:
        warp.block.waiting.append(warp)
        self.park(warp, operation, now, "barrier", "the other warps of its block at their barrier")
        self.release(warp.block, now)
        return NOBODY_KNOWS

    def _make(self, warp: Warp, operation: Operation, effect: effects.InitMbarrier, now: float) -> float:
        if effect.address is None or effect.count is None:
            raise ClockFault("an mbarrier is made of which address or count are unknown")
        warp.block.mbarriers[effect.address] = Mbarrier(effect.address, effect.count)
        return now + operation.latency

    def _arrive(self, warp: Warp, operation: Operation, effect: effects.Arrive, now: float) -> float:
        mbarrier = warp.block.mbarrier(effect.address)
        if mbarrier.arrive(effect.count, effect.expected_bytes):
            self._over(mbarrier, now)
        return now + operation.latency

    def _await(self, warp: Warp, operation: Operation, effect: effects.AwaitPhase, now: float) -> float:
        mbarrier = warp.block.mbarrier(effect.address)
        if effect.parity is None:
            raise ClockFault("a phase is awaited of which the parity is unknown")
        if mbarrier.over(effect.parity):
            return now + operation.latency
        self.awaiting_phase[mbarrier].append(warp)
        return self.park(warp, operation, now, "mbarrier", mbarrier)

    def _over(self, mbarrier: Mbarrier, now: float) -> None:
        """A phase is over: those who waited for it go on, as if they asked only now."""
        when = now + POLL
        for warp in self.awaiting_phase.pop(mbarrier, ()):
            if mbarrier.copied >= 0.0:
                warp.parked = "copies"
                self.loaded(warp, when, "UTMALDG", mbarrier.copied)
            self._resume(warp, when, max(warp.ready, when))

    def _resume(self, warp: Warp, issued: float, when: float) -> None:
        """A parked warp goes on then; its instruction counts as issued now."""
        operation = warp.paused
        assert operation is not None, f"{warp} does not wait"
        if operation.writes is not None:
            warp.hold(operation.writes, issued + operation.latency, operation.opcode, issued)
        self.wake(warp, when)

    def _copy(self, warp: Warp, operation: Operation, effect: effects.Copy, now: float) -> float:
        size, mbarrier = self._size(effect), warp.block.mbarrier(effect.mbarrier)
        self.push(self.bandwidth.copy(now, size), CopyInFlight(mbarrier, size, now))
        return now + operation.latency

    def _put(self, warp: Warp, operation: Operation, effect: effects.Put, now: float) -> float:
        self.bandwidth.store(now, self._size(effect))
        self._join(warp, self.bandwidth.stores + STORE_LATENCY, operation, now)
        return now + operation.latency

    def _size(self, effect: effects.Copy | effects.Put) -> int:
        if effect.descriptor is None or effect.descriptor not in self.boxes:
            known = ", ".join(f"{offset:#x}" for offset in sorted(self.boxes)) or "none"
            found = "unknown" if effect.descriptor is None else f"{effect.descriptor:#x}"
            raise ClockFault(f"the copy's descriptor is {found}; boxes are known of: {known}")
        return self.boxes[effect.descriptor]

    def _global(self, warp: Warp, operation: Operation, effect: effects.Global, now: float) -> float:
        size = effect.sectors * SECTOR
        if effect.store:
            self.bandwidth.store(now, size)
            return now + operation.latency
        done = self.bandwidth.load(now, size)
        if effect.shared:
            self.bandwidth.access(now, effect.bytes / SHARED)
            self.bandwidth.landed += effect.bytes
            self._join(warp, done + LOAD_LATENCY, operation, now)
            return now + operation.latency
        return done + operation.latency

    def _join(self, warp: Warp, done: float, operation: Operation, now: float) -> None:
        """One more copy since the last commit."""
        warp.open = max(warp.open, (done, now, operation.opcode))

    def _local(self, warp: Warp, operation: Operation, effect: effects.Local, now: float) -> float:
        return self.bandwidth.access(now, effect.bytes / SHARED) + operation.latency
