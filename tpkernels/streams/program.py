"""The program that ranks enqueue: tasks, and the tasks that must precede each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

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


class End(NamedTuple):
    """One end of a message between two ranks, or from a rank to itself."""

    message: Hashable  # the other end has it, too
    peer: int
    sends: bool
    rows: Tensor | None  # None: no data, as in a barrier
    what: str  # the collective that it is part of

    def __hash__(self) -> int:
        return hash((self.message, self.sends))


class Work(NamedTuple):
    """Sizes of a task's computation or transfer, to predict its time."""

    kind: str  # "product", "kernel", "copy" to another rank, "flag" or "none"
    size: tuple[int, ...] = ()  # of a product its rows, columns and depth; else bytes
    to: int | None = None  # the receiving rank


NO_WORK = Work("none")


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
    ends: tuple[End, ...] = ()  # of a collective, which continues once the other ends have arrived
    sums: bool = False  # received rows are added up, in the order of ranks
    work: Work = NO_WORK
    leaves: int | None = None  # processors left free by a product that takes all others; None: no product
    needs_at_once: int = 1  # processors before it continues

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
    numbers: bool = True  # False: tasks have sizes only, and rank 0's stand for all ranks': see `times`
    tasks: list[Task] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)  # of each rank, as `body` has returned them
    memories: list[Memory] = field(default_factory=list)
    turned: dict[int, int] = field(default_factory=dict)  # a peer's flag -> our flag raised then
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

    def rank_at(self, address: int) -> int:
        """Return the rank whose memory has an address."""
        return self._memory_at(address).rank

    def place(self, address: int) -> str:
        memory = self._memory_at(address)
        return f"at byte {address - memory.first} of rank {memory.rank}"

    def _memory_at(self, address: int) -> Memory:
        return next(memory for memory in self.memories if memory.holds(address))
