"""Where a warp's instructions queue beyond issue and pipe: tensor cores, shared memory, groups of copies.

Of these instructions the code alone says what they do; what others do depends on values (see reactions).
"""

from __future__ import annotations

from collections import defaultdict

from tpkernels.gate.clock.bandwidth import Bandwidth
from tpkernels.gate.clock.blocks import Warp
from tpkernels.gate.clock.events import Events
from tpkernels.gate.clock.operations import Kind, Operation
from tpkernels.gate.clock.tensor_cores import GROUP, TensorCores, WarpGroup

_STORES = {"STG", "ST", "RED", "REDG"}


class Units:
    def __init__(self, events: Events, bandwidth: Bandwidth) -> None:
        self.events, self.bandwidth, self.machine = events, bandwidth, bandwidth.machine
        self.tensor_cores = TensorCores(bandwidth.machine, bandwidth)
        # warps that wait until a product of their group starts, and so is known to end
        self.waiting: defaultdict[WarpGroup, list[Warp]] = defaultdict(list)

    def limit(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        """When the instruction may issue, and what it waits for; it is not issued yet."""
        kind = operation.kind
        if kind == Kind.ACCESS:
            return self.bandwidth.shared - self.machine.shared_queued, "shared memory"
        if kind == Kind.PRODUCT:
            return self._room(warp, operation, now)
        if kind == Kind.AWAIT_PRODUCTS:
            return self._products(warp, operation, now)
        if kind == Kind.AWAIT_GROUPS:
            return self._groups(warp, operation, now)
        if kind == Kind.GLOBAL:
            way = self.bandwidth.stores if operation.opcode in _STORES else self.bandwidth.loads
            return way - self.machine.memory_queued, "memory"
        return 0.0, ""

    def issue(self, warp: Warp, operation: Operation, now: float) -> float:
        """When its scoreboard is released."""
        kind = operation.kind
        if kind == Kind.ACCESS:
            warp.stores |= operation.opcode in ("STS", "STSM")
            return self.bandwidth.access(now, operation.shared) + operation.latency
        if kind == Kind.PRODUCT:
            self._product(warp, operation, now)
        elif kind == Kind.PRODUCT_ALONE:
            begin = self.tensor_cores.issue_alone(now, warp.scheduler)
            warp.ready = max(warp.ready, begin)
            self.events.mark(warp, operation.opcode, now, warp.at)
            return begin + operation.latency
        elif kind == Kind.AWAIT_PRODUCTS:
            if not operation.pending and warp.drained < 0.0:  # not once more with nothing in between
                warp.drained, warp.stores = now, False
        elif kind == Kind.COMMIT:
            warp.groups.append(warp.open)
            warp.open = (0.0, 0.0, "")
        elif kind == Kind.AWAIT_GROUPS:
            while len(warp.groups) > operation.pending:
                warp.groups.popleft()
        return now + operation.latency

    def _room(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        before = warp.group.issued[warp.member] - self.machine.products_queued
        if before < 0:
            return 0.0, ""
        if before < len(warp.group.begins):
            return warp.group.begins[before], "tensor cores full"
        return self._park(warp, operation, now, before)

    def _products(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        if len(warp.closed) <= operation.pending:
            return 0.0, ""
        last = warp.closed[-operation.pending - 1]
        if last < len(warp.group.ends):
            return warp.group.ends[last] + self.machine.drain, "products"
        return self._park(warp, operation, now, last)

    def _park(self, warp: Warp, operation: Operation, now: float, product: int) -> tuple[float, str]:
        self.waiting[warp.group].append(warp)
        awaits = f"product {product}, which not all {GROUP} warps of its group have issued"
        return self.events.park(warp, operation, now, "products", awaits), "products"

    def _groups(self, warp: Warp, operation: Operation, now: float) -> tuple[float, str]:
        awaited = len(warp.groups) - operation.pending
        if awaited <= 0:
            return 0.0, ""
        done, issued, opcode = max(warp.groups[index] for index in range(awaited))
        if opcode != "LDGSTS":
            return done, "stores"
        if done > now:
            self.events.loaded(warp, now, done, opcode, warp.at, issued)
        return done, "copies"

    def _product(self, warp: Warp, operation: Operation, now: float) -> None:
        events, group = self.events, warp.group
        if operation.closes:
            warp.closed.append(group.issued[warp.member])
        events.mark(warp, operation.opcode, now, warp.at)
        events.close_epilogue(warp, now)
        if self.tensor_cores.issue(now, group, warp.member, operation.ideal, operation.read):
            what = operation.step.instruction.modifiers[0]
            first = warp.number - warp.member
            events.recorder.span(warp.block.number, first, "products", group.begins[-1], group.ends[-1], what)
            for waiting in self.waiting.pop(group, ()):
                events.wake(waiting, now)
