"""Simulates tasks in queues that share resources, event by event.

    queue      tasks start in the given order, one after the other: a stream, a host
    thread line       one task after the other, first come first served: the socket to a peer
    resource   concurrent tasks share it: the processors of a GPU, one direction of a link

A task alone takes its `seconds`, and uses a share of each resource. If tasks want more than all of a
resource, each gets at least an equal share, unless it wants less; its scarcest resource sets its speed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

HOST, COMPUTE, NCCL, COPIES = "host", "compute", "NCCL", "copies"  # queues of a rank
PRODUCT, KERNEL, TRANSFER, LAUNCH, NOTHING = "product", "kernel", "transfer", "launch", "nothing"  # kinds
TaskKey = tuple[Hashable, ...]
Queue = tuple[Hashable, ...]  # its kind, and its number
Resource = tuple[Hashable, ...]

_DONE = 1e-12  # seconds left of a task by rounding


@dataclass(frozen=True, slots=True)
class TimelineTask:
    """A task of a queue, and its duration."""

    key: TaskKey
    queue: Queue
    seconds: float  # if nothing else runs
    after: tuple[TaskKey, ...] = ()  # tasks that end before it starts
    uses: Mapping[Resource, float] = field(default_factory=dict)  # shares, of 1, while it runs at full speed
    name: str = ""
    kind: str = ""  # for readers of the result


@dataclass(frozen=True, slots=True)
class Ran:
    """A task, and when it ran."""

    task: TimelineTask
    start: float
    stop: float


def run(tasks: Sequence[TimelineTask], lines: Collection[Queue] = ()) -> dict[TaskKey, Ran]:
    """Run all tasks; return when each ran, in seconds from the start of the first.

    lines: queues whose tasks start in the order in which they become ready
    """
    return _Scheduler(tasks, lines).all()


class _Scheduler:
    def __init__(self, tasks: Sequence[TimelineTask], lines: Collection[Queue]) -> None:
        self._tasks = {task.key: task for task in tasks}
        if len(self._tasks) < len(tasks):
            raise ValueError("two tasks have the same key")
        self._followers: dict[TaskKey, list[TaskKey]] = defaultdict(list)
        self._missing: dict[TaskKey, int] = {}  # the number of tasks that it still waits for
        self._queues: dict[Queue, deque[TaskKey]] = defaultdict(deque)
        self._ready: set[TaskKey] = set()
        self._lines = lines
        for task in tasks:
            after = set(task.after)
            if unknown := after - self._tasks.keys():
                raise ValueError(f"{task.key} waits for {sorted(map(str, unknown))}, which do not exist")
            for key in after:
                self._followers[key].append(task.key)
            self._missing[task.key] = len(after)
            if task.queue not in lines:
                self._queues[task.queue].append(task.key)
        self._busy: set[Queue] = set()
        self._left: dict[TaskKey, float] = {}  # seconds at full speed, of what runs
        self._began: dict[TaskKey, float] = {}
        self._ran: dict[TaskKey, Ran] = {}
        self._now = 0.0

    def all(self) -> dict[TaskKey, Ran]:
        for key in [key for key, missing in self._missing.items() if not missing]:
            self._become_ready(key)
        self._start(list(self._queues))
        while self._left:
            speeds = _speeds([self._tasks[key] for key in self._left])
            step = min(left / speeds[key] for key, left in self._left.items())
            self._now += step
            ended = []
            for key in list(self._left):
                self._left[key] -= step * speeds[key]
                if self._left[key] <= _DONE:
                    ended.append(key)
            self._end(ended)
        if waiting := self._tasks.keys() - self._ran.keys():
            raise RuntimeError(f"these tasks wait for each other: {sorted(map(str, waiting))[:8]}")
        return self._ran

    def _end(self, keys: Iterable[TaskKey]) -> None:
        touched = []
        for key in keys:
            task = self._tasks[key]
            del self._left[key]
            self._ran[key] = Ran(task, self._began[key], self._now)
            self._busy.discard(task.queue)
            touched.append(task.queue)
            for follower in self._followers[key]:
                self._missing[follower] -= 1
                if not self._missing[follower]:
                    self._become_ready(follower)
                    touched.append(self._tasks[follower].queue)
        self._start(touched)

    def _become_ready(self, key: TaskKey) -> None:
        self._ready.add(key)
        queue = self._tasks[key].queue
        if queue in self._lines:
            self._queues[queue].append(key)

    def _start(self, queues: Iterable[Queue]) -> None:
        for queue in dict.fromkeys(queues):
            waiting = self._queues[queue]
            if queue not in self._busy and waiting and waiting[0] in self._ready:
                key = waiting.popleft()
                self._busy.add(queue)
                self._left[key], self._began[key] = max(0.0, self._tasks[key].seconds), self._now


def _speeds(running: Sequence[TimelineTask]) -> dict[TaskKey, float]:
    wanting: dict[Resource, list[TimelineTask]] = defaultdict(list)
    for task in running:
        for resource in task.uses:
            wanting[resource].append(task)
    speeds = {task.key: 1.0 for task in running}
    for resource, tasks in wanting.items():
        if sum(task.uses[resource] for task in tasks) <= 1.0:
            continue
        there = 1.0
        tasks.sort(key=lambda task: task.uses[resource])
        for number, task in enumerate(tasks):
            wanted = task.uses[resource]
            given = min(wanted, there / (len(tasks) - number))
            there -= given
            speeds[task.key] = min(speeds[task.key], given / wanted)
    return speeds
