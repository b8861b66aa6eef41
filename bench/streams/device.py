"""One rank's GPU as its host uses it: an allocator that reuses memory, streams, events, graphs.

The program that ranks enqueue: tasks, and the tasks that must precede each.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Span = tuple[int, int]  # addresses: of the first byte, and of the one past the last


class Awaited(NamedTuple):
    """A flag that must equal another word; both are addresses of int32."""

    flag: int
    word: int


@dataclass(frozen=True, slots=True)
class Step:
    """An atomic step of a kernel's program, run when its flags are raised."""

    run: Callable[[], None] = lambda: None
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    awaits: tuple[Awaited, ...] = ()
    raises: Callable[[], Sequence[int]] = lambda: ()  # addresses of the flags that it has written in `run`
    gives_up: Callable[[int], None] | None = None  # told the number of the flag in `awaits` that is late


class TransferEnd(NamedTuple):
    """One end of a message between two ranks, or from a rank to itself."""

    message: Hashable  # the other end has it, too
    peer: int
    sends: bool
    rows: Tensor | None  # None: no data, as in a barrier
    what: str  # the collective that it is part of

    def __hash__(self) -> int:
        return hash((self.message, self.sends))


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel, a copy, or a word that a stream writes."""

    number: int
    rank: int
    stream: int  # or a stream of a graph's replay; tasks of a stream are ordered
    name: str
    after: frozenset[int]  # numbers of tasks of this rank
    held_up_by: frozenset[int]  # tasks of this rank that loading a kernel may have waited for
    programs: tuple[tuple[Step, ...], ...]  # of a kernel, each on a processor; of a copy one
    on_processors: bool
    ends: tuple[TransferEnd, ...] = ()  # of a collective, which continues once the other ends have arrived
    sums: bool = False  # received rows are added up, in the order of ranks
    leaves: int | None = None  # processors left free by a product that takes all others; None: no product
    needs_at_once: int = 1  # processors before it continues
    channel: Hashable = None  # of a barrier

    def __str__(self) -> str:
        return f"rank {self.rank}, stream {self.stream}: {self.name} (task {self.number})"


class Memory(Protocol):
    """One rank's memory."""

    rank: int
    first: int  # address

    def reset(self) -> None:
        """Set the memory to its state before any task runs."""

    def holds(self, address: int) -> bool:
        """Whether an address is in this memory."""

    def has_shared(self, address: int) -> bool:
        """Whether an address is in memory that ranks share."""

    def tensor_at(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the contiguous tensor at an address."""


@dataclass
class Program:
    """Tasks of all ranks, in the order in which each host enqueues its own."""

    ranks: int
    processors: int  # of each rank's GPU
    tasks: list[Task] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)  # of each rank, as `body` has returned them
    memories: list[Memory] = field(default_factory=list)
    _sent: Counter[Hashable] = field(default_factory=Counter)

    def number(self, kind: Hashable, rank: int) -> int:
        """Count and return this rank's calls of a kind, so that ranks give a common call the same number."""
        self._sent[kind, rank] += 1
        return self._sent[kind, rank]

    @cached_property
    def then(self) -> list[list[int]]:
        """The tasks after each task, by number."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for task in self.tasks:
            for number in task.after | task.held_up_by:
                found[number].append(task.number)
        return found

    @cached_property
    def cells(self) -> dict[Span, range]:
        """Each span as a range of cells of memory, which no span splits."""
        spans = {
            span
            for task in self.tasks
            for steps in task.programs
            for step in steps
            for span in (*step.reads, *step.writes)
        }
        edges = sorted({edge for span in spans for edge in span})
        number = {edge: index for index, edge in enumerate(edges)}
        return {span: range(number[span[0]], number[span[1]]) for span in spans}

    def tensor_at(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in any rank's memory."""
        return self._memory_at(address).tensor_at(address, shape, dtype)

    def is_shared(self, address: int) -> bool:
        """Whether an address is in memory that ranks share."""
        return self._memory_at(address).has_shared(address)

    def place(self, address: int) -> str:
        memory = self._memory_at(address)
        return f"at byte {address - memory.first} of rank {memory.rank}"

    def _memory_at(self, address: int) -> Memory:
        return next(memory for memory in self.memories if memory.holds(address))


MEMORY = 1 << 21  # bytes of a rank
ROUNDED = 512  # bytes, as torch's allocator does
FREED = "memory is freed"
POISON = 0xFF  # a NaN in every dtype of numbers


class MachineError(RuntimeError):
    """A GPU would refuse the program, or compute wrong results."""


class AllocatorBlock:
    """A block of memory from the allocator; it is freed with the last tensor in it."""

    __slots__ = ("__weakref__", "capture", "device", "size", "start", "stream", "used_elsewhere")

    def __init__(self, device: Device, start: int, size: int, stream: Stream) -> None:
        self.device, self.start, self.size, self.stream = device, start, size, stream
        self.capture = device.capture  # a graph has its own memory
        self.used_elsewhere = False  # `record_stream`

    def __del__(self) -> None:
        self.device.freed(self)


class Stream:
    """Replaces `torch.Stream` and `torch.cuda.Stream`."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.virtual = current_device()
        self.number = next(self.virtual.stream_numbers)
        self.before: frozenset[int] = frozenset()  # the tasks before the next one
        self.capture: Graph | None = None
        self._entered: list[Stream] = []

    @property
    def device(self) -> torch.device:
        return self.virtual.device

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.require_recorded()
        if event.capture is not None and self.capture is None and event.capture is self.virtual.capture:
            event.capture.join(self)
        elif event.capture is not self.capture:
            raise MachineError(
                "a captured stream waits for an event outside the capture, or the reverse: the capture fails"
            )
        self.before |= event.tasks

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.virtual.host_waits(self.before)

    def __enter__(self) -> Stream:
        self._entered.append(self.virtual.stream)
        self.virtual.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.virtual.stream = self._entered.pop()


class Event:
    """Replaces `torch.Event` and `torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None:
        self.tasks: frozenset[int] = frozenset()
        self.capture: Graph | None = None
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_device().stream
        self.tasks, self.capture, self._recorded = stream.before, stream.capture, True

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_device().stream).wait_event(self)

    def synchronize(self) -> None:
        current_device().host_waits(self.tasks)

    def query(self) -> bool:
        raise MachineError("an event is queried, but the machine records before it runs: wait for the event")

    def require_recorded(self) -> None:
        if not self._recorded:
            raise MachineError("a stream waits for an event that was never recorded: it does not wait")


class Graph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._tasks: list[Task] = []
        self._streams: list[tuple[Stream, frozenset[int]]] = []  # with each one's tasks before

    def capture_begin(self, *_: object, **__: object) -> None:
        device = current_device()
        if device.capture is not None:
            raise MachineError("a capture begins within another")
        device.capture = self
        self.join(device.stream)

    def join(self, stream: Stream) -> None:
        self._streams.append((stream, stream.before))
        stream.capture, stream.before = self, frozenset()

    def add(self, task: Task) -> None:
        self._tasks.append(task)

    def capture_end(self) -> None:
        device = current_device()
        origin, _ = self._streams[0]
        device.capture = None
        enqueued = {task.number for task in self._tasks if task.name != FREED}  # no task of a GPU
        joined = set(origin.before)
        for task in reversed(self._tasks):
            if task.number in joined:
                joined |= task.after
        for stream, before in self._streams:
            stream.capture, stream.before = None, before
        if left := enqueued - joined:
            first = next(task for task in self._tasks if task.number in left)
            raise MachineError(f"a capture ends while a stream has not been joined: {first}")

    def replay(self) -> None:
        """Enqueue all tasks again, after the current stream's tasks; the stream continues after them."""
        device = current_device()
        current, renamed, streams = device.stream, dict[int, int](), dict[int, int]()
        for task in self._tasks:
            after = frozenset(renamed[number] for number in task.after) or current.before
            stream = streams.setdefault(task.stream, next(device.stream_numbers))
            renamed[task.number] = device.repeat(task, stream, after)
        inner = {number for task in self._tasks for number in task.after}
        ends = frozenset(renamed[task.number] for task in self._tasks if task.number not in inner)
        current.before = ends or current.before


@dataclass
class TorchSettings:
    """torch's settings in a rank's process."""

    reserved: int | None = None  # SMs that products leave free
    library: Any = torch._C._BlasBackend.Cublas  # that torch prefers for products


class Device:
    """One rank's GPU, which records its tasks."""

    device = torch.device("cuda", 0)

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.settings = TorchSettings()
        self.memory = torch.full((MEMORY,), POISON, dtype=torch.uint8)
        self.first = self.memory.data_ptr()
        self.used = 0
        self.stream_numbers = itertools.count()
        self.capture: Graph | None = None
        self._free: defaultdict[tuple[int, int, object], list[int]] = defaultdict(list)
        self._host: frozenset[int] = frozenset()  # tasks that the host has waited for
        self._loading: frozenset[int] = frozenset()  # tasks that loading a kernel may have waited for
        self._loaded: set[str] = set()
        self._last: dict[int, int] = {}  # task of each stream
        self._captured = itertools.count(-1, -1)  # numbers of tasks that run when their graph is replayed
        self._zeroed: list[Tensor] = []
        self._open = True
        with self:
            self.stream = Stream()  # the default one
        self.everlasting = AllocatorBlock(self, 0, 0, self.stream)  # for memory that is never freed
        self.everlasting.used_elsewhere = True

    def __enter__(self) -> Device:
        _devices.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _devices.pop()

    def allocate(self, size: int) -> AllocatorBlock:
        """Allocate, first from memory freed last in the same stream, as torch's allocator does."""
        rounded = max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
        free = self._free[self.stream.number, rounded, self.capture]
        if free:
            start = free.pop()
        else:
            start, self.used = self.used, self.used + rounded
            self._require_room()
        return AllocatorBlock(self, start, rounded, self.stream)

    def _require_room(self) -> None:
        if self.used > self.memory.numel():
            raise MachineError(f"out of memory: a rank has {self.memory.numel()} bytes")

    def freed(self, block: AllocatorBlock) -> None:
        """Overwrite a freed block in its stream and allow its reuse: a later reader is in a race."""
        if not self._open or block.used_elsewhere or block.capture is not self.capture:
            return
        start, end = block.start, block.start + block.size
        part = self.memory[start:end]
        span = self.first + start, self.first + end
        step = Step(partial(_poison, part), writes=(span,))
        self.enqueue(FREED, [[step]], on_processors=False, stream=block.stream)
        self._free[block.stream.number, block.size, self.capture].append(start)

    def tensor(
        self, block: AllocatorBlock, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return self.memory[block.start : block.start + block.size].view(dtype).as_strided(shape, stride)

    def shared(self, size: int) -> Tensor:
        """Allocate zeroed bytes that are never freed."""
        start, self.used = self.used, self.used + -(-size // ROUNDED) * ROUNDED
        self._require_room()
        zeroed = self.memory[start : start + size]
        zeroed.zero_()
        self._zeroed.append(zeroed)
        return zeroed

    def reset(self) -> None:
        """Set the memory to its state before any task runs."""
        self.memory[: self.used].fill_(POISON)
        for memory in self._zeroed:
            memory.zero_()

    def has_shared(self, address: int) -> bool:
        offsets = (address - zeroed.data_ptr() for zeroed in self._zeroed)
        return any(0 <= offset < zeroed.numel() for offset, zeroed in zip(offsets, self._zeroed, strict=True))

    def holds(self, address: int) -> bool:
        """Whether an address is in this rank's memory."""
        return self.first <= address < self.first + self.memory.numel()

    def tensor_at(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        start = address - self.first
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[start : start + count].view(dtype).view(*shape)

    def enqueue(
        self,
        name: str,
        programs: Sequence[Sequence[Step]],
        *,
        on_processors: bool = True,
        stream: Stream | None = None,
        ends: Sequence[TransferEnd] = (),
        needs_at_once: int = 1,
        sums: bool = False,
        leaves: int | None = None,
        channel: Hashable = None,
    ) -> None:
        """Enqueue a task in a stream, by default the current one."""
        if not all(programs):
            raise MachineError(f"{name}: expected at least one step in each program of a kernel, got none")
        programs = programs or [[Step()]]  # a grid of nothing
        stream = stream or self.stream
        number = len(self.program.tasks) if stream.capture is None else next(self._captured)
        after = stream.before if stream.capture is not None else stream.before | self._host
        steps = tuple(tuple(steps) for steps in programs)
        task = Task(
            *(number, self.rank, stream.number, name, after, self._loading - after, steps, on_processors),
            ends=tuple(ends),
            needs_at_once=needs_at_once,
            sums=sums,
            leaves=leaves,
            channel=channel,
        )
        if stream.capture is None:
            self._add(task)
        else:
            stream.capture.add(task)
        stream.before = frozenset({number})

    def repeat(self, task: Task, stream: int, after: frozenset[int]) -> int:
        """Enqueue a task of a graph again; return its number."""
        number = len(self.program.tasks)
        times = self.program.number(("replays", task.number), self.rank)
        ends = tuple(end._replace(message=(end.message, times)) for end in task.ends)
        after |= self._host
        held_up_by = self._loading - after
        self._add(replace(task, number=number, stream=stream, after=after, held_up_by=held_up_by, ends=ends))
        return number

    def _add(self, task: Task) -> None:
        self.program.tasks.append(task)
        self._last[task.stream] = task.number

    def load(self, kernel: str) -> None:
        """Load a kernel at its first launch, which may wait for all tasks of the device."""
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            if self.capture is not None:
                raise MachineError(f"a capture loads {kernel}, which has not been launched before")
            self._loading = frozenset(self._last.values())

    def host_waits(self, tasks: frozenset[int]) -> None:
        """Order all later tasks of the host after these."""
        if self.capture is not None:
            raise MachineError("the host waits for the device in a capture")
        self._host = tasks if tasks >= self._host else tasks | self._host

    def synchronize(self) -> None:
        self.host_waits(frozenset(self._last.values()))

    def close(self) -> None:
        """End the host code: memory freed from now on is not recorded."""
        self._open = False


def _poison(memory: Tensor) -> None:
    memory.fill_(POISON)


_devices: list[Device] = []


def current_device() -> Device:
    """Return the device of the rank whose host code runs."""
    if not _devices:
        raise MachineError("no rank's host code runs: see bench.streams.record")
    return _devices[-1]
