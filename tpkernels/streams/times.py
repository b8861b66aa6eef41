"""Computes when a program's tasks run on the GPUs, links and hosts of a `Node`.

All ranks of a group do the same, rotated round the ring, so one recorded rank stands for all. Its sends
occupy its link both ways, because a peer sends to it at the same time. A collective begins when the rank
arrives, because its peers arrive at the same time. Awaited rows arrive when the rank has sent the same rows
to the rank on its other side (`Program.turned`), earlier in its own program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpkernels.streams.node import Node
from tpkernels.streams.program import Program, Step, Task
from tpkernels.streams.simulation import (
    COMPUTE,
    COPIES,
    HOST,
    KERNEL,
    LAUNCH,
    NCCL,
    NOTHING,
    PRODUCT,
    TRANSFER,
    Ran,
    Resource,
    TaskKey,
    TimelineTask,
    run,
)

_LINK: tuple[Resource, ...] = (("link", "out"), ("link", "in"))
_PROCESSORS: Resource = ("processors",)
_US = 1e-6


@dataclass(frozen=True)
class Costs:
    """The time and resources of a task."""

    place: str
    kind: str
    seconds: float = 0.0
    launch: float = 0.0  # microseconds of the host
    uses: Mapping[Resource, float] = field(default_factory=dict)


def times_of(program: Program, calls: Sequence[range], node: Node) -> list[list[Ran]]:
    """Return when the tasks of each call ran, if all tasks before the first call were done.

    calls: the numbers of each call's tasks
    """
    ran = run(list(_Timed(program, calls, node).tasks())).values()
    return [[each for each in ran if each.task.key[0] == call] for call in range(len(calls))]


class _Timed:
    """Converts a program's tasks to tasks of a simulation."""

    def __init__(self, program: Program, calls: Sequence[range], node: Node) -> None:
        self._program, self._node, self._first = program, node, calls[0].start
        self._call_of = {task: call for call, tasks in enumerate(calls) for task in tasks}
        self._last: dict[int, TaskKey] = {}  # the last piece of each task
        self._raised: dict[int, TaskKey] = {}  # by our flag: the piece whose end raises it

    def tasks(self) -> Iterator[TimelineTask]:
        """Yield all tasks; each call begins with some time of the host."""
        latest = None
        for task in self._program.tasks[self._first :]:
            call = self._call_of.get(task.number)
            if call not in (None, latest):
                seconds = _US * self._node.host.call
                yield TimelineTask((call, "begins"), (HOST,), seconds, name="call", kind=LAUNCH)
            latest = call
            yield from self._parts(task, call)

    def _parts(self, task: Task, call: int | None) -> Iterator[TimelineTask]:
        """Yield a task's launch, and its pieces."""
        costs, launch = self._costs(task), (call, task.number)
        yield TimelineTask(launch, (HOST,), _US * costs.launch, name=task.name, kind=LAUNCH)
        before = (launch, *(self._last[number] for number in task.after if number >= self._first))
        pieces, count = self._pieces(task), sum(map(len, task.programs))
        for number, (steps, seen) in enumerate(pieces, 1):
            key = (call, task.number, number)
            seconds = costs.seconds * len(steps) / count
            yield TimelineTask(
                key,
                (costs.place, task.stream),
                seconds,
                (*before, *seen),
                {**costs.uses, **self._stores(task, steps, seconds)},
                f"{task.name} {number}" if len(pieces) > 1 else task.name,
                costs.kind,
            )
            self._last[task.number] = key
            for step in steps:
                turned = (self._program.turned.get(flag) for flag in step.raises())
                self._raised.update((flag, key) for flag in turned if flag is not None)

    def _pieces(self, task: Task) -> list[tuple[list[Step], set[TaskKey]]]:
        """Group steps that await the same flags; a step that raises a flag is a piece of its own."""
        in_turn = [
            steps[number]
            for number in range(max(map(len, task.programs)))
            for steps in task.programs
            if number < len(steps)
        ]
        pieces: list[tuple[list[Step], set[TaskKey]]] = []
        for step in in_turn:
            seen = {self._raised[flag] for flag, _ in step.awaits if flag in self._raised}
            raises = task.work.kind == "product" and not step.awaits
            if not pieces or raises or seen != pieces[-1][1]:
                pieces.append(([], seen))
            pieces[-1][0].append(step)
        return pieces

    def _costs(self, task: Task) -> Costs:
        """Return the costs of a task that runs alone."""
        work, node, host = task.work, self._node, self._node.host
        if task.ends and task.ends[0].rows is not None:
            share = node.nccl.channels / node.gpu.processors
            seconds = node.nccl.seconds(
                _sent(task, self._program.ranks), node.gpu.nvlink, self._program.ranks
            )
            uses = {_PROCESSORS: share, **dict.fromkeys(_LINK, 1.0)}
            return Costs(NCCL, TRANSFER, seconds, host.collective, uses)
        if work.kind == "product":
            left_free = node.nccl.channels if task.leaves else 0
            rows, cols, depth = work.size
            seconds = node.times.product(rows, cols, depth, left_free)
            seconds *= node.waiting if task.leaves is None else 1.0  # it waits, or pushes
            uses = {_PROCESSORS: 1 - left_free / node.gpu.processors}
            return Costs(COMPUTE, PRODUCT, seconds, host.product, uses)
        if work.kind == "kernel":
            launch = host.copy if task.name.startswith("copy_") else host.kernel
            return Costs(COMPUTE, KERNEL, node.times.streamed(work.size[0]), launch, {_PROCESSORS: 1.0})
        if work.kind == "copy":
            seconds = work.size[0] / (node.copy_share * node.gpu.nvlink)
            return Costs(COPIES, TRANSFER, seconds, host.copy, dict.fromkeys(_LINK, 1.0))
        if work.kind == "flag":
            return Costs(COPIES, KERNEL, node.copy_latency)
        return Costs(COMPUTE, NOTHING)

    def _stores(self, task: Task, steps: Sequence[Step], seconds: float) -> dict[Resource, float]:
        """Return the fraction of the link that a product's stores to other ranks take."""
        if task.work.kind != "product":
            return {}
        spans = [span for step in steps for span in step.writes if self._program.rank_at(span[0])]
        if not (stored := sum(last - first for first, last in spans)):
            return {}
        return dict.fromkeys(_LINK, stored / (self._node.store_share * self._node.gpu.nvlink) / seconds)


def _sent(task: Task, ranks: int) -> float:
    """Return the bytes that a rank sends; of an all-reduce twice those of a reduce-scatter."""
    leaving = [end.rows.nbytes for end in task.ends if end.sends and end.peer and end.rows is not None]
    return sum(leaving) * (2 / ranks if task.ends[0].what == "all-reduce" else 1)
