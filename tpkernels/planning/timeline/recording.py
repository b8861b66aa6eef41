"""What one rank enqueues: its host thread launches, its streams run. As CUDA orders it, so the model does."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from tpkernels.planning.timeline.simulation import Resource, TaskKey, TimelineTask

COMPUTE, NCCL, COPIES, HOST = "compute", "NCCL", "copies", "host"  # queues of a rank
PRODUCT, KERNEL, TRANSFER, LAUNCH, READY = "product", "kernel", "transfer", "launch", "ready"  # kinds
US = 1e-6


class Rank:
    """Records tasks of one rank into a list that all ranks share."""

    def __init__(self, number: int, ranks: int, tasks: list[TimelineTask]) -> None:
        self.number, self.ranks = number, ranks
        self.call = 0  # the one being recorded
        self._transfers = 0  # so far: as many on all ranks, so that keys meet
        self._tasks, self._count = tasks, 0
        self._awaited: list[TaskKey] = []  # what the compute stream waits for next
        self.last: TaskKey | None = None  # on the compute stream
        self.in_flight: set[TaskKey] = set()  # collectives that the compute stream does not wait for yet

    def key(self, *what: Hashable) -> TaskKey:
        """Of a task that other ranks may wait for."""
        return (self.number, self.call, *what)

    def next_transfer(self) -> int:
        """Its number in the call."""
        self._transfers += 1
        return self._transfers

    def add(
        self,
        queue: Hashable,
        name: str,
        seconds: float,
        after: Sequence[TaskKey] = (),
        *,
        kind: str,
        uses: Mapping[Resource, float] | None = None,
        key: TaskKey | None = None,
    ) -> TaskKey:
        if key is None:
            self._count += 1
            key = self.key(queue, self._count)
        self._tasks.append(
            TimelineTask(key, (self.number, queue), seconds, tuple(after), uses or {}, name, kind)
        )
        return key

    def host(self, name: str, microseconds: float) -> TaskKey:
        return self.add(HOST, name, US * microseconds, kind=LAUNCH)

    def compute(
        self,
        name: str,
        seconds: float,
        launched: TaskKey | None,
        after: Sequence[TaskKey] = (),
        *,
        kind: str = PRODUCT,
        key: TaskKey | None = None,
        uses: Mapping[Resource, float] | None = None,
    ) -> TaskKey:
        """On the compute stream, which has waited for what `wait` was told."""
        waits = [*self._awaited, *after, *([launched] if launched else [])]
        self._awaited.clear()
        used = {self.processors: 1.0, **(uses or {})}
        self.last = self.add(COMPUTE, name, seconds, waits, kind=kind, key=key, uses=used)
        return self.last

    def wait(self, keys: Sequence[TaskKey]) -> None:
        """The compute stream goes on when these have ended."""
        self._awaited += keys
        self.in_flight.difference_update(keys)

    def so_far(self) -> list[TaskKey]:
        """What another stream waits for that waits for the compute stream."""
        return [*self._awaited, *([self.last] if self.last else [])]

    @property
    def processors(self) -> Resource:
        return self.number, "processors"

    def sends(self, to: int | None = None) -> dict[Resource, float]:
        """All of the link, out of this rank and into `to` (by default itself, whose peers send as much)."""
        return {(self.number, "out"): 1.0, (self.number if to is None else to, "in"): 1.0}
