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
from tpkernels.gate.clock.blocks import Barrier, Mbarrier, ThreadBlock, Warp
from tpkernels.gate.clock.faults import UnknownBox, UnknownPlace
from tpkernels.gate.clock.operations import Operation
from tpkernels.gate.clock.rates import SmRates
from tpkernels.gate.clock.resources import GROUP, Bandwidth, TensorCores, WarpGroup
from tpkernels.gate.clock.table import OpcodeKind
from tpkernels.gate.clock.timeline import Issue, WarpSpan, WarpWait

NOBODY_KNOWS = math.inf
SECTOR = 32  # bytes
SHORTEST = 16.0  # cycles of a wait that a time line shows
_STORES = {"STG", "ST", "RED", "REDG"}


class CopyInFlight:
    """Bytes of a copy on their way to an mbarrier."""

    def __init__(self, mbarrier: Mbarrier, size: int, issued: float) -> None:
        self.mbarrier, self.bytes, self.issued = mbarrier, size, issued


class ArrivalInFlight:
    """An arrival on its way from another block of the cluster."""

    def __init__(self, mbarrier: Mbarrier, count: int) -> None:
        self.mbarrier, self.count = mbarrier, count


class Sm:
    """boxes: bytes that a copy moves, by its descriptor; drawing: whether spans are kept"""

    def __init__(self, machine: SmRates, boxes: Mapping[int, int], drawing: bool) -> None:
        self.machine, self.boxes, self.drawing = machine, boxes, drawing
        self.marks: list[Issue] = []
        self.waits: list[WarpWait] = []
        self.spans: list[WarpSpan] = []
        self.bandwidth = Bandwidth(machine)
        self.tensor_cores = TensorCores(machine, self.bandwidth)
        self.heap: list[tuple[float, int, Warp | CopyInFlight | ArrivalInFlight]] = []  # what comes next
        self.order = count().__next__  # of what happens at the same time
        # warps that wait until a product of their group starts, and so is known to end
        self.awaiting_product: defaultdict[WarpGroup, list[Warp]] = defaultdict(list)
        self.awaiting_phase: defaultdict[Mbarrier, list[Warp]] = defaultdict(list)
        does = {
            OpcodeKind.PLAIN: (self._no_limit, self._issue),
            OpcodeKind.ACCESS: (self._shared, self._access),
            OpcodeKind.PRODUCT: (self._room, self._product),
            OpcodeKind.PRODUCT_ALONE: (self._no_limit, self._product_alone),
            OpcodeKind.AWAIT_PRODUCTS: (self._products, self._have_products),
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
            effects.BarrierArrive: self._arrive_only,
            effects.InitMbarrier: self._make,
            effects.Arrive: self._arrive,
            effects.AwaitPhase: self._await,
            effects.Copy: self._copy,
            effects.Put: self._put,
            effects.Global: self._global,
            effects.Local: self._local,
            effects.SetRegisters: self._set_registers,
        }

    def push(self, when: float, event: Warp | CopyInFlight | ArrivalInFlight) -> None:
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
        if end - start >= SHORTEST:
            self.span(warp, "waits", start, end, cause)

    def span(self, warp: Warp, lane: str, start: float, end: float, what: str) -> None:
        if self.drawing:
            self.spans.append(WarpSpan(warp.block.number, warp.number, lane, start, end, what))

    def loaded(self, warp: Warp, start: float, end: float, what: str, index: int, issued: float) -> None:
        """The warp has waited for a load or a copy that was issued then."""
        serial = 0.0 <= warp.last_wait <= issued
        self.waits.append(WarpWait(warp.block.number, warp.number, start, end, what, index, issued, serial))
        warp.last_wait = end

    def mark(self, warp: Warp, opcode: str, now: float, index: int) -> None:
        self.marks.append(Issue(warp.block.number, warp.number, now, opcode, index))

    def close_epilogue(self, warp: Warp, now: float) -> None:
        """From having all its products to its next one a warp is in the epilogue, if it stores anything."""
        if warp.drained >= 0.0 and warp.stores:
            self.span(warp, "epilogue", warp.drained, now, "")
        warp.drained = -1.0

    def _no_limit(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        return 0.0, ""

    def _shared(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        return self.bandwidth.shared - self.machine.shared_queued, "shared memory"

    def _memory(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        way = self.bandwidth.stores if operation.opcode in _STORES else self.bandwidth.loads
        return way - self.machine.memory_queued, "memory"

    def _issue(self, warp: Warp, operation: Operation, now: float) -> float:
        return now + operation.latency

    def _access(self, warp: Warp, operation: Operation, now: float) -> float:
        warp.stores |= operation.opcode in ("STS", "STSM")
        return self.bandwidth.access(now, operation.shared) + operation.latency

    def _product_alone(self, warp: Warp, operation: Operation, now: float) -> float:
        begin = self.tensor_cores.issue_alone(now, warp.scheduler)
        warp.ready = max(warp.ready, begin)
        self.mark(warp, operation.opcode, now, warp.at)
        return begin + operation.latency

    def _fence(self, warp: Warp, operation: Operation, now: float) -> float:
        """The warp goes on when what was stored has left the SM and is seen."""
        done = max(now, self.bandwidth.stores) + operation.latency
        self.stalled(warp, now + operation.stall, done, "memory fence")
        warp.ready = max(warp.ready, done)
        return done

    def _have_products(self, warp: Warp, operation: Operation, now: float) -> float:
        if not operation.pending and warp.drained < 0.0:  # not once more with nothing in between
            warp.drained, warp.stores = now, False
        return now + operation.latency

    def _commit(self, warp: Warp, operation: Operation, now: float) -> float:
        warp.groups.append(warp.open)
        warp.open = (0.0, 0.0, "")
        return now + operation.latency

    def _have_groups(self, warp: Warp, operation: Operation, now: float) -> float:
        while len(warp.groups) > operation.pending:
            warp.groups.popleft()
        return now + operation.latency

    def _room(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        before = warp.group.issued[warp.member] - self.machine.products_queued
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
            return warp.group.ends[last] + self.machine.drain, "products"
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
            self.loaded(warp, now, done, opcode, warp.at, issued)
        return done, "copies"

    def _product(self, warp: Warp, operation: Operation, now: float) -> float:
        group = warp.group
        if operation.closes:
            warp.closed.append(group.issued[warp.member])
        self.mark(warp, operation.opcode, now, warp.at)
        self.close_epilogue(warp, now)
        if self.tensor_cores.issue(now, group, warp.member, operation.ideal, operation.read):
            what = operation.step.instruction.modifiers[0]
            first = warp.block.warps[warp.number - warp.member]
            self.span(first, "products", group.begins[-1], group.ends[-1], what)
            for waiting in self.awaiting_product.pop(group, ()):
                self.wake(waiting, now)
        return now + operation.latency

    def release(self, block: ThreadBlock, barrier: Barrier, now: float) -> None:
        """Lets those go on who wait at a barrier, if all have arrived."""
        for warp in barrier.take(block.running):
            when = now + self.machine.barrier
            self._resume(warp, when, max(warp.ready, when))

    def land(self, landing: CopyInFlight | ArrivalInFlight, now: float) -> None:
        mbarrier = landing.mbarrier
        if isinstance(landing, ArrivalInFlight):
            if mbarrier.arrive(landing.count, 0):
                self._over(mbarrier, now)
            return
        self.bandwidth.landed += landing.bytes
        if mbarrier.complete(landing.bytes, landing.issued):
            self._over(mbarrier, now)

    def _jump(self, warp: Warp, operation: Operation, effect: effects.Jump, now: float) -> float:
        warp.at = effect.index
        return now + operation.latency

    def _sync(self, warp: Warp, operation: Operation, effect: effects.BarrierSync, now: float) -> float:
        barrier = warp.block.barrier(effect.number)
        barrier.arrive(effect.threads)
        barrier.waiting.append(warp)
        self.park(warp, operation, now, "barrier", barrier)
        self.release(warp.block, barrier, now)
        return NOBODY_KNOWS

    def _arrive_only(
        self, warp: Warp, operation: Operation, effect: effects.BarrierArrive, now: float
    ) -> float:
        barrier = warp.block.barrier(effect.number)
        barrier.arrive(effect.threads)
        self.release(warp.block, barrier, now)
        return now + operation.latency

    def _make(self, warp: Warp, operation: Operation, effect: effects.InitMbarrier, now: float) -> float:
        warp.block.mbarriers.make(effect.address, effect.count)
        return now + operation.latency

    def _arrive(self, warp: Warp, operation: Operation, effect: effects.Arrive, now: float) -> float:
        mbarrier = warp.block.mbarriers[effect.address]
        if mbarrier.arrive(effect.count, effect.expected_bytes):
            self._over(mbarrier, now)
        if effect.remote and effect.count:  # the other block of a pair does what this one does, when it does
            self.push(now + self.machine.remote, ArrivalInFlight(mbarrier, effect.count))
        return now + operation.latency

    def _await(self, warp: Warp, operation: Operation, effect: effects.AwaitPhase, now: float) -> float:
        mbarrier = warp.block.mbarriers[effect.address]
        self.mark(warp, operation.opcode, now, warp.at - 1)
        if effect.parity is None:
            raise UnknownPlace("a phase is awaited of which the parity is unknown")
        if mbarrier.over(effect.parity):
            return now + operation.latency
        self.awaiting_phase[mbarrier].append(warp)
        return self.park(warp, operation, now, "mbarrier", mbarrier)

    def _over(self, mbarrier: Mbarrier, now: float) -> None:
        """A phase is over: those who waited for it go on, as if they asked only now."""
        when = now + self.machine.poll
        for warp in self.awaiting_phase.pop(mbarrier, ()):
            if mbarrier.copied >= 0.0:
                warp.parked = "copies"
                self.loaded(warp, warp.since, when, "UTMALDG", warp.at - 1, mbarrier.copied)
            self._resume(warp, when, max(warp.ready, when))

    def _resume(self, warp: Warp, issued: float, when: float) -> None:
        """A parked warp goes on then; its instruction counts as issued now."""
        operation = warp.paused
        assert operation is not None, f"{warp} does not wait"
        if operation.writes is not None:
            warp.hold(operation.writes, issued + operation.latency, operation.opcode, issued)
        self.wake(warp, when)

    def _copy(self, warp: Warp, operation: Operation, effect: effects.Copy, now: float) -> float:
        size = self._size(effect)
        mbarrier = warp.block.mbarriers[effect.mbarrier]
        if effect.blocks not in (1, 2):
            raise UnknownBox(f"a copy goes into {effect.blocks} blocks, and the clock knows pairs")
        done = self.bandwidth.copy(now, size, effect.blocks)
        self.push(done, CopyInFlight(mbarrier, size, now))
        self.mark(warp, operation.opcode, now, warp.at - 1)
        self.span(warp, "copies", now, done, f"{size} bytes")
        return now + operation.latency

    def _put(self, warp: Warp, operation: Operation, effect: effects.Put, now: float) -> float:
        size = self._size(effect)
        done = self.bandwidth.put(now, size)
        self._join(warp, done, operation, now)
        self.mark(warp, operation.opcode, now, warp.at - 1)
        self.span(warp, "stores", now, done, f"{size} bytes")
        warp.stores = True
        return now + operation.latency

    def _size(self, effect: effects.Copy | effects.Put) -> int:
        if effect.descriptor is None or effect.descriptor not in self.boxes:
            known = ", ".join(f"{offset:#x}" for offset in sorted(self.boxes)) or "none"
            found = "unknown" if effect.descriptor is None else f"{effect.descriptor:#x}"
            raise UnknownBox(f"the copy's descriptor is {found}; boxes are known of: {known}")
        return self.boxes[effect.descriptor]

    def _global(self, warp: Warp, operation: Operation, effect: effects.Global, now: float) -> float:
        size = effect.sectors * SECTOR
        if effect.store:
            self.bandwidth.store(now, size)
            warp.stores = True
            return now + operation.latency
        done = self.bandwidth.load(now, size)
        if effect.shared:
            self.bandwidth.access(now, effect.bytes / self.machine.shared)
            self.bandwidth.landed += effect.bytes
            self._join(warp, done + self.machine.load_latency, operation, now)
            return now + operation.latency
        return done + operation.latency

    def _join(self, warp: Warp, done: float, operation: Operation, now: float) -> None:
        """One more copy since the last commit."""
        warp.open = max(warp.open, (done, now, operation.opcode))

    def _local(self, warp: Warp, operation: Operation, effect: effects.Local, now: float) -> float:
        return self.bandwidth.access(now, effect.bytes / self.machine.shared) + operation.latency

    def _set_registers(
        self, warp: Warp, operation: Operation, effect: effects.SetRegisters, now: float
    ) -> float:
        block = warp.block
        pool = f"{effect.count} registers of its block's pool, which has {block.pool}"
        self.park(warp, operation, now, "registers", pool)
        for served in block.set_registers(warp, effect.count, effect.acquire):
            self._resume(served, now, max(now, served.ready))
        return NOBODY_KNOWS
