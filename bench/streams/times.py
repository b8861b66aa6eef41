"""Computes when a program's tasks run on the GPUs, links and hosts of a `Node`.

All ranks of a group do the same, rotated round the ring, so one recorded rank stands for all. Its sends
occupy its link both ways, because a peer sends to it at the same time. A collective begins when the rank
arrives, because its peers arrive at the same time. Awaited rows arrive when the rank has sent the same rows
to the rank on its other side (`Program.turned`), earlier in its own program.

Each figure of a `Node` has its source. A processor (SM) computes the tiles of a product one after the other.
A tile takes `edge` cycles, plus `step` cycles for each step of depth; a launch takes `start` cycles more. Any
other kernel takes the time of its bytes.

Simulates tasks in queues that share resources, event by event.

    queue      tasks start in the given order, one after the other: a stream, a host
    line       one task after the other, first come first served: the socket to a peer
    resource   concurrent tasks share it: the processors of a GPU, one direction of a link

A task alone takes its `seconds`, and uses a share of each resource. If tasks want more than all of a
resource, each gets at least an equal share, unless it wants less; its scarcest resource sets its speed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from bench.streams.device import Program, Step, Task
from tpkernels.env import NCCL_BLOCKS
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import Target
from tpkernels.kernels.tiles import default_tile
from tpkernels.planning.gpus import RatedGpu

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


_FLOPS_A_CYCLE = 4096  # tensor cores of one processor of an H100, dense bf16: data sheet
_H100_RATE = 989e12 / 132  # of one processor; other GPUs are scaled by their data sheets


@dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles of a product on one processor."""

    step: float  # a step of depth
    edge: float  # a tile beyond its steps
    start: float  # a launch beyond its tiles


def usual_cycles(tile: MatmulTile, asking: float) -> Cycles:
    """Return cycles of our kernels, within some percent of the count of their machine code.

    The tensor cores are busy at most 95 % of a step, or wait for operands: the L2 gives 40 bytes a cycle if
    all processors ask, 64 if few do. An edge is the time of `linear` to fill its stages and to store.

    asking: the fraction of processors with a tile
    """
    rows, cols, depth = tile.block_rows, tile.block_cols, tile.block_depth
    ideal = 2 * rows * cols * depth / _FLOPS_A_CYCLE
    operands = 2 * (rows + cols) * depth
    step = max(ideal / 0.95, operands * max(asking / 40, 1 / 64))
    return Cycles(step, edge=3700 * rows * cols / (128 * 256), start=1500)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of kernels without waits: products in waves, at the clock that power allows.

    power_clock: Hz with all tensor cores busy. Power grows as f V², and V as f, so a kernel that keeps them
        busy for a fraction of the time runs at power_clock * fraction^(-1/3), up to `boost`. Boards differ:
        published times of one product vary by 20 %.
    """

    gpu: RatedGpu
    power_clock: float = 1.45e9
    boost: float = 1.98e9  # H100 SXM: nvidia-smi -q -d CLOCK
    memory_share: float = 0.9  # of the data sheet's bytes a second
    launch: float = 2e-6  # from one kernel to the next in a stream

    def product(self, rows: int, cols: int, depth: int, left_free: int = 0) -> float:
        """Return seconds of a product. left_free: processors that it does not use"""
        if not (rows and cols and depth):
            return 0.0
        processors = self.gpu.processors
        like_h100 = Target("cuda", 90, processors)
        tile = default_tile("linear", "descriptor", torch.bfloat16, like_h100, rows, cols)
        steps, tiles = -(-depth // tile.block_depth), tile.tiles(rows, cols)
        cycles = usual_cycles(tile, min(1.0, tiles / processors))
        on_busiest = -(-tiles // (processors - left_free))
        total = cycles.start + on_busiest * (cycles.edge + steps * cycles.step)
        ideal = 2 * tile.block_rows * tile.block_cols * tile.block_depth / _FLOPS_A_CYCLE
        busy = ideal * steps * tiles / processors / total
        computing = total / self.clock(busy) * _H100_RATE / (self.gpu.flops / processors)
        traffic = 2.0 * (rows * depth + cols * depth + rows * cols)
        return self.launch + max(computing, traffic / self._bytes_a_second)

    def streamed(self, traffic: float) -> float:
        """Return seconds of a kernel that reads and writes `traffic` bytes and computes almost nothing."""
        return self.launch + traffic / self._bytes_a_second

    def clock(self, busy: float) -> float:
        """Return Hz if tensor cores are busy for this fraction of the time."""
        return min(self.boost, self.power_clock * float(max(busy, 0.05) ** (-1 / 3)))

    @property
    def _bytes_a_second(self) -> float:
        return self.gpu.bytes * self.memory_share


@dataclass(frozen=True, slots=True)
class Host:
    """Microseconds of the host's launching thread: docs/launches.md, and about 5 of CUDA for each launch.

    A CUDA graph is one launch; its kernels follow each other without the host.
    """

    call: float = 22.0  # of an operator, without its launches
    collective: float = 20.0
    product: float = 21.0
    kernel: float = 21.0  # any other
    copy: float = 8.0  # with the word that the stream writes after it
    naive_product: float = 12.0  # F.linear without autograd
    naive_collective: float = 25.0
    decomposed_product: float = 16.0  # 8 chunks with their copies take 277 in all (kraken, PR 2)


GRAPH = Host(5.0, *[0.0] * 7)


@dataclass(frozen=True, slots=True)
class Nccl:
    """Times of NCCL collectives of R ranks in a node with NVLink switches.

    NCCL uses the faster of two protocols: of low latency, or of high bandwidth. Fitted to the device times of
    all-gathers of 2 to 128 MiB on 8 H100 (Megatron-LM, pull request 5596): 20.2, 43.4, 118.9, 385.3 µs.
    """

    protocols: tuple[tuple[float, float], ...] = ((12.5e-6, 0.527), (30e-6, 0.735))  # s, fraction of the link
    channels: int = NCCL_BLOCKS  # blocks, each on one processor
    latency_ranks: int = 8  # of these figures; latency grows with the steps of a ring

    def seconds(self, sent: float, link: float, ranks: int) -> float:
        """Return seconds. sent: bytes that each rank sends; link: bytes a second of the data sheet"""
        steps = (ranks - 1) / (self.latency_ranks - 1)
        return min(latency * (0.5 + 0.5 * steps) + sent / (share * link) for latency, share in self.protocols)


@dataclass(frozen=True, slots=True)
class Node:
    """Figures of a node for the model of a call."""

    gpu: RatedGpu
    times: KernelTimes
    host: Host = field(default_factory=Host)
    nccl: Nccl = field(default_factory=Nccl)
    copy_share: float = 0.82  # of the link, reached by a copy engine: 370 GB/s of 450 in public tests
    copy_latency: float = 3e-6  # from one copy of a stream to the next, flag included
    store_share: float = 0.75  # of the link, reached by a kernel's stores
    waiting: float = 1.036  # a waiting product is not flattened; by the count of its machine code

    @staticmethod
    def of(gpu: RatedGpu) -> Node:
        return Node(gpu, KernelTimes(gpu))

    def with_host(self, host: Host) -> Node:
        return replace(self, host=host)


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
