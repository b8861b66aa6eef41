"""When tasks run: those of a program, as large as they would be, on the GPUs of the model of calls.

A program is recorded with small matrices. Here each length counts `scale` times: a product takes as long as
the model of `planning.timeline` says, a copy as long as its bytes take on the link. Hosts take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpkernels.planning.timeline.node import Node
from tpkernels.planning.timeline.simulation import Resource, run
from tpkernels.planning.timeline.simulation import TaskKey as Key
from tpkernels.planning.timeline.simulation import TimelineTask as Timed
from tpkernels.streams.execution import Execution, Place
from tpkernels.streams.program import Program, Task

_READ = 4  # bytes of a number as recorded; the model's are of bfloat16
_MODEL = 2


def times_of(program: Program, node: Node, scale: int) -> dict[int, tuple[float, float]]:
    """Seconds at which each task starts and stops, by its number."""
    execution = Execution(program, seed=0)
    execution.run()
    timed = _Timed(program, node, scale, execution.saw)
    ran = run(timed.tasks)
    return {
        number: (min(ran[key].start for key in keys), max(ran[key].stop for key in keys))
        for number, keys in timed.keys.items()
    }


@dataclass
class _Timed:
    """The program's tasks as those of the model."""

    program: Program
    node: Node
    scale: int
    saw: Mapping[Place, set[Place]]
    tasks: list[Timed] = field(default_factory=list)
    keys: dict[int, list[Key]] = field(default_factory=dict)
    _at: dict[Place, Key] = field(default_factory=dict)  # what a step is part of

    def __post_init__(self) -> None:
        for task in self.program.tasks:
            self._name_steps(task)
        for task in self.program.tasks:
            self._add(task)

    def _name_steps(self, task: Task) -> None:
        """Steps that see the same flags one after the other, or raise one, are one piece of a kernel."""
        places = self._in_order(task)
        pieces: list[set[Place]] = []
        for place in places:
            seen = self.saw.get(place, set())
            raises = task.work.kind == "product" and not seen
            if not pieces or raises or seen != pieces[-1]:
                pieces.append(seen)
            self._at[place] = ("piece", task.number, len(pieces) - 1)
        self.keys[task.number] = [("piece", task.number, piece) for piece in range(max(1, len(pieces)))]

    def _in_order(self, task: Task) -> list[Place]:
        """Steps as programs that take turns do them."""
        places = [
            (task.number, program, step)
            for program, steps in enumerate(task.programs)
            for step in range(len(steps))
        ]
        return sorted(places, key=lambda place: (place[2], place[1]))

    def _add(self, task: Task) -> None:
        keys, places = self.keys[task.number], self._in_order(task)
        before = tuple(self.keys[number][-1] for number in task.after)
        queue = task.rank, task.stream
        if task.ends and task.ends[0].rows is not None:
            self._add_collective(task, before)
            return
        seconds, uses = self._cost(task)
        for key in keys:
            parts = [place for place in places if self._at[place] == key]
            flags = {self._at[seen] for place in parts for seen in self.saw.get(place, ())}
            share = len(parts) / len(places)
            self.tasks.append(
                Timed(key, queue, share * seconds, (*before, *sorted(flags)), uses, task.name, task.work.kind)
            )

    def _add_collective(self, task: Task, before: tuple[Key, ...]) -> None:
        """It begins once all ranks that it has to do with are there."""
        leaving = [end for end in task.ends if end.sends and end.peer != task.rank]
        sent = sum(end.rows.nbytes for end in leaving if end.rows is not None)
        nccl, ranks = self.node.nccl, self.program.ranks
        seconds = nccl.seconds(self._bytes(sent), self.node.gpu.nvlink, ranks)
        ready = ("ready", task.number)
        self.tasks.append(Timed(ready, (task.rank, "ready", task.stream), 0.0, before))
        others = {("ready", other.number) for other in self._partners(task)}
        share = nccl.channels / self.node.gpu.processors
        occupied: dict[Resource, float] = {(task.rank, "processors"): share}
        (key,) = self.keys[task.number]
        self.tasks.append(
            Timed(
                *(key, (task.rank, task.stream), seconds, (ready, *sorted(others))),
                uses={**occupied, **self._link(task.rank, task.rank)},
                name=task.name,
                kind="collective",
            )
        )

    def _partners(self, task: Task) -> list[Task]:
        messages = {end.message for end in task.ends}
        return [
            other
            for other in self.program.tasks
            if other.rank != task.rank and any(end.message in messages for end in other.ends)
        ]

    def _cost(self, task: Task) -> tuple[float, Mapping[Resource, float]]:
        """Seconds of a task that has the GPU for itself, and what it takes of what."""
        work, node = task.work, self.node
        if work.kind == "product":
            left_free = node.nccl.channels if task.leaves else 0
            rows, cols, depth = (self.scale * length for length in work.size)
            seconds = node.times.product("linear", rows, cols, depth, left_free)
            waits = task.leaves is None  # a kernel of ours
            seconds *= node.waiting if waits else 1.0
            return seconds, {(task.rank, "processors"): 1 - left_free / node.gpu.processors}
        if work.kind == "kernel":
            return node.times.streamed(self._bytes(work.size[0])), {(task.rank, "processors"): 1.0}
        if work.kind == "copy":
            assert work.to is not None, "it goes to a rank"
            seconds = self._bytes(work.size[0]) / (node.copy_share * node.gpu.nvlink)
            return seconds, self._link(task.rank, work.to)
        return (node.copy_latency if work.kind == "flag" else 0.0), {}

    def _bytes(self, recorded: float) -> float:
        return recorded * self.scale**2 * _MODEL / _READ

    def _link(self, rank: int, to: int) -> dict[Resource, float]:
        return {(rank, "out"): 1.0, (to, "in"): 1.0}


def call_seconds(times: Mapping[int, tuple[float, float]], calls: Sequence[Sequence[int]]) -> float:
    """Of the last of some calls, each with the tasks of all ranks."""
    *_, before, last = (max(times[number][1] for number in call) for call in calls)
    return last - before
