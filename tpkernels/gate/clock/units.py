"""Where a warp's instructions queue beyond issue and pipe: tensor cores, shared memory, groups of copies.

Of these instructions the code alone says what they do; what others do depends on values (see reactions).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

from tpkernels.gate.clock.bandwidth import Bandwidth
from tpkernels.gate.clock.blocks import Warp
from tpkernels.gate.clock.events import Events
from tpkernels.gate.clock.operations import Kind, Operation
from tpkernels.gate.clock.tensor_cores import GROUP, TensorCores, WarpGroup

_STORES = {"STG", "ST", "RED", "REDG"}


Does = TypeVar("Does")


def _by_kind(usual: Does, others: Mapping[Kind, Does]) -> list[Does]:
    """A list, for it is looked up at each instruction."""
    return [others.get(kind, usual) for kind in Kind]


class Units:
    def __init__(self, events: Events, bandwidth: Bandwidth) -> None:
        self.events, self.bandwidth, self.machine = events, bandwidth, bandwidth.machine
        self.tensor_cores = TensorCores(bandwidth.machine, bandwidth)
        # warps that wait until a product of their group starts, and so is known to end
        self.waiting: defaultdict[WarpGroup, list[Warp]] = defaultdict(list)
        # by kind: when an instruction that is not issued yet may issue, and what it waits for
        self.limits = _by_kind(
            self._no_limit,
            {
                Kind.ACCESS: self._shared,
                Kind.PRODUCT: self._room,
                Kind.AWAIT_PRODUCTS: self._products,
                Kind.AWAIT_GROUPS: self._groups,
                Kind.GLOBAL: self._memory,
            },
        )
        # by kind: issues it, and says when its scoreboard is released
        self.issues = _by_kind(
            self._issue,
            {
                Kind.ACCESS: self._access,
                Kind.PRODUCT: self._product,
                Kind.PRODUCT_ALONE: self._product_alone,
                Kind.AWAIT_PRODUCTS: self._have_products,
                Kind.COMMIT: self._commit,
                Kind.AWAIT_GROUPS: self._have_groups,
            },
        )

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
        self.events.mark(warp, operation.opcode, now, warp.at)
        return begin + operation.latency

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
        done, issued, opcode = max(islice(warp.groups, awaited))
        if opcode != "LDGSTS":
            return done, "stores"
        if done > now:
            self.events.loaded(warp, now, done, opcode, warp.at, issued)
        return done, "copies"

    def _product(self, warp: Warp, operation: Operation, now: float) -> float:
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
        return now + operation.latency
