"""How the SM answers effects: jumps, barriers, mbarriers, copies, stores, registers.

Each method returns when the instruction's scoreboard is released; NOBODY_KNOWS if the warp is parked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tpkernels.gate.clock import effects
from tpkernels.gate.clock.bandwidth import Bandwidth
from tpkernels.gate.clock.blocks import Barrier, Block, Warp
from tpkernels.gate.clock.events import NOBODY_KNOWS, Events, Landing
from tpkernels.gate.clock.faults import UnknownBox, UnknownPlace
from tpkernels.gate.clock.mbarriers import Mbarrier
from tpkernels.gate.clock.operations import Operation

SECTOR = 32  # bytes


class Reactions:
    def __init__(self, events: Events, bandwidth: Bandwidth, boxes: Mapping[int, int]) -> None:
        self.events, self.bandwidth, self.machine, self.boxes = events, bandwidth, bandwidth.machine, boxes
        self.waiting: defaultdict[Mbarrier, list[Warp]] = defaultdict(list)  # until its phase is over
        self.of: dict[type, Callable[[Warp, Operation, Any, float], float]] = {
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

    def release(self, block: Block, barrier: Barrier, now: float) -> None:
        """Lets those go on who wait at a barrier, if all have arrived."""
        for warp in barrier.take(block.running):
            when = now + self.machine.barrier
            self._resume(warp, when, max(warp.ready, when))

    def land(self, landing: Landing, now: float) -> None:
        mbarrier = landing.mbarrier
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
        self.events.park(warp, operation, now, "barrier", barrier)
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
        return now + operation.latency

    def _await(self, warp: Warp, operation: Operation, effect: effects.AwaitPhase, now: float) -> float:
        mbarrier = warp.block.mbarriers[effect.address]
        self.events.mark(warp, operation.opcode, now, warp.at - 1)
        if effect.parity is None:
            raise UnknownPlace("a phase is awaited of which the parity is unknown")
        if mbarrier.over(effect.parity):
            return now + operation.latency
        self.waiting[mbarrier].append(warp)
        return self.events.park(warp, operation, now, "mbarrier", mbarrier)

    def _over(self, mbarrier: Mbarrier, now: float) -> None:
        """A phase is over: those who waited for it go on, as if they asked only now."""
        when = now + self.machine.poll
        for warp in self.waiting.pop(mbarrier, ()):
            if mbarrier.copied >= 0.0:
                warp.parked = "copies"
                self.events.loaded(warp, warp.since, when, "UTMALDG", warp.at - 1, mbarrier.copied)
            self._resume(warp, when, max(warp.ready, when))

    def _resume(self, warp: Warp, issued: float, when: float) -> None:
        """A parked warp goes on then; its instruction counts as issued now."""
        operation = warp.paused
        assert operation is not None, f"{warp} does not wait"
        if operation.writes is not None:
            warp.hold(operation.writes, issued + operation.latency, operation.opcode, issued)
        self.events.wake(warp, when)

    def _copy(self, warp: Warp, operation: Operation, effect: effects.Copy, now: float) -> float:
        size = self._size(effect)
        mbarrier = warp.block.mbarriers[effect.mbarrier]
        done = self.bandwidth.copy(now, size)
        self.events.push(done, Landing(mbarrier, size, now))
        self.events.mark(warp, operation.opcode, now, warp.at - 1)
        self.events.recorder.span(warp.block.number, warp.number, "copies", now, done, f"{size} bytes")
        return now + operation.latency

    def _put(self, warp: Warp, operation: Operation, effect: effects.Put, now: float) -> float:
        size = self._size(effect)
        done = self.bandwidth.put(now, size)
        self._join(warp, done, operation, now)
        self.events.mark(warp, operation.opcode, now, warp.at - 1)
        self.events.recorder.span(warp.block.number, warp.number, "stores", now, done, f"{size} bytes")
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
        self.events.park(warp, operation, now, "registers", pool)
        for served in block.set_registers(warp, effect.count, effect.acquire):
            self._resume(served, now, max(now, served.ready))
        return NOBODY_KNOWS
