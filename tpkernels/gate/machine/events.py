"""What the roles of a kernel do to memory that they share, in the order in which each does it.

Values go along as closures, which the search never calls: an event is also all that the search knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from tpkernels.gate.machine.memory import View, Written


@dataclass(frozen=True, eq=False)
class TraceEvent:
    number: int  # unique in a trace
    where: str  # "linear.py:120"

    def shape(self) -> tuple[object, ...]:
        """All of it that the search looks at."""
        values = [getattr(self, each.name) for each in fields(self) if each.repr]
        return (type(self).__name__, *(_cells(value) for value in values))


def _cells(value: object) -> object:
    if isinstance(value, View):
        return value.cells
    return tuple(map(_cells, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True, eq=False)
class Init(TraceEvent):
    barrier: int
    count: int


@dataclass(frozen=True, eq=False)
class Invalidate(TraceEvent):
    barrier: int


@dataclass(frozen=True, eq=False)
class Wait(TraceEvent):
    """Goes on once the phase of this parity has completed."""

    barrier: int
    parity: int


@dataclass(frozen=True, eq=False)
class Expect(TraceEvent):
    """Arrives once, and adds bytes to what the phase waits for."""

    barrier: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Arrive(TraceEvent):
    barrier: int
    count: int


@dataclass(frozen=True, eq=False)
class CopyIn(TraceEvent):
    """A TMA load: lands any time later, and counts on its barrier then."""

    barrier: int
    view: View
    nbytes: int
    land: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Multiply(TraceEvent):
    """A wgmma: reads its operands any time until it is retired."""

    views: tuple[View, ...]
    read: Callable[[], None] = field(repr=False)
    finish: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class TensorMultiply(TraceEvent):
    """A tcgen05.mma: reads operands and writes sums any time until a commit after it has arrived."""

    views: tuple[View, ...]
    sums: tuple[View, ...]
    adds: bool  # to the sums that are there
    read: Callable[[], None] = field(repr=False)
    finish: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Commit(TraceEvent):
    """Arrives once at a barrier, any time after the tcgen05 products that its role started before."""

    barrier: int


@dataclass(frozen=True, eq=False)
class MultiplyWait(TraceEvent):
    """Retires all but the last `pending` multiplications of this role."""

    pending: int


@dataclass(frozen=True, eq=False)
class Load(TraceEvent):
    """ld.shared."""

    view: View
    effect: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Store(TraceEvent):
    """st.shared."""

    view: View
    effect: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Fence(TraceEvent):
    """Orders what this role loads from and stores to shared memory before what TMA and wgmma do to it."""


@dataclass(frozen=True, eq=False)
class CopyOut(TraceEvent):
    """A TMA store: reads its buffer any time until it is retired."""

    view: View
    read: Callable[[], None] = field(repr=False)
    write: Callable[[Written], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class StoreWait(TraceEvent):
    """Retires the reads of all but the last `pending` TMA stores of this role."""

    pending: int


@dataclass(frozen=True, eq=False)
class Global(TraceEvent):
    """Loads and stores through pointers."""

    effect: Callable[[Written], None] = field(repr=False)


@dataclass(frozen=True, eq=False)
class BlockEnd(TraceEvent):
    """A block of a pair ends, and its shared memory with it."""

    block: int


@dataclass(frozen=True)
class Role:
    name: str
    events: tuple[TraceEvent, ...]


@dataclass(frozen=True)
class Trace:
    """One program: its segments follow each other, the roles of a segment run at the same time.

    A pair of blocks has one segment. Its roles wait for each other at barriers that need no `Init`.
    """

    segments: tuple[tuple[Role, ...], ...]
    barriers: tuple[str, ...]  # names
    cells: tuple[str, ...]  # names
    arrivals: tuple[
        tuple[int, int], ...
    ] = ()  # of a pair: barriers that are there, and what their phases take
    ends: tuple[
        int, ...
    ] = ()  # of a pair: the barrier that stands for each block, one phase on once it ended
    block_of: tuple[int | None, ...] = ()  # of a pair: the block in which each barrier lies

    def shape(self) -> tuple[object, ...]:
        """All of it that the search looks at."""
        roles = (role for segment in self.segments for role in segment)
        return tuple((role.name, *(event.shape() for event in role.events)) for role in roles)
