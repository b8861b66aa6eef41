"""A trace made ready for stepping: roles cut into steps, and what each role has in use between them.

Between two steps other roles may go on; within one they need not. A role can only learn of others by a wait,
and others learn of it by its arrivals. So a step begins with a wait, or with whatever follows an arrival, and
ends with arrivals: what lies between could as well happen at any one moment, unless another role touches the
same memory without being ordered. Then some order of whole steps has it touched at the wrong time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tpkernels.gate.machine.events import (
    Arrive,
    BlockEnd,
    Commit,
    CopyIn,
    CopyOut,
    Expect,
    Fence,
    Init,
    Invalidate,
    Load,
    Multiply,
    MultiplyWait,
    Role,
    Store,
    StoreWait,
    TensorMultiply,
    Trace,
    TraceEvent,
    Wait,
)

Cells = frozenset[int]


@dataclass(frozen=True)
class Held:
    """What a role has in use at some place of its events."""

    multiplied: tuple[tuple[Multiply, Cells], ...] = ()  # in flight, oldest first
    copied: tuple[tuple[CopyOut, Cells], ...] = ()
    unfenced: Cells = frozenset()  # stored to, and not yet visible to TMA and wgmma
    loaded: Cells = frozenset()  # and not fenced since: a copy in may come before the load

    @cached_property
    def read(self) -> Cells:
        """What a product or a copy may still read."""
        return frozenset().union(*(cells for _, cells in (*self.multiplied, *self.copied)))

    def of(self, cells: Cells) -> tuple[Cells, Cells, Cells]:
        """Of these cells: what others can tell."""
        return self.read & cells, self.unfenced & cells, self.loaded & cells

    def after(self, event: TraceEvent) -> Held:
        if isinstance(event, Multiply):
            return replace(self, multiplied=(*self.multiplied, (event, _cells_of(event))))
        if isinstance(event, MultiplyWait):
            return replace(self, multiplied=_last(self.multiplied, event.pending))
        if isinstance(event, CopyOut):
            return replace(self, copied=(*self.copied, (event, _cells_of(event))))
        if isinstance(event, StoreWait):
            return replace(self, copied=_last(self.copied, event.pending))
        if isinstance(event, Store):
            return replace(self, unfenced=self.unfenced | _cells_of(event))
        if isinstance(event, Load):
            return replace(self, loaded=self.loaded | _cells_of(event))
        if isinstance(event, Fence):
            return Held(self.multiplied, self.copied)
        return self


def _last(queue: tuple, count: int) -> tuple:  # type: ignore[type-arg]  # of either kind
    return queue[max(0, len(queue) - count) :]


class Track:
    """The events of a role, and what it holds before each; `ends[i]`: where the step from i on ends."""

    def __init__(self, role: Role, block_of: Sequence[int | None]) -> None:
        self.name, self.events = role.name, role.events
        self.held = [Held()]
        for event in role.events:
            self.held.append(self.held[-1].after(event))
        self.ends = {begin: end for begin, end in _steps(role.events)}
        # of each step: the barriers that it waits for, arrives at or has copies count on
        self.touched = {
            begin: frozenset(
                barrier for event in role.events[begin:end] for barrier in _barriers_of(event, block_of)
            )
            for begin, end in self.ends.items()
        }
        self.cells: Cells = frozenset().union(*map(_cells_of, role.events))
        self.commits = [(at, event) for at, event in enumerate(role.events) if isinstance(event, Commit)]
        self.products = [
            (at, event) for at, event in enumerate(role.events) if isinstance(event, TensorMultiply)
        ]

    def multiplying(self, at: int, flying: Sequence[Sequence[int]]) -> list[TensorMultiply]:
        """The products of tensor cores, of those begun before `at`, that no commit tells to be complete."""
        told = (
            place
            for place, commit in self.commits
            if commit.number not in flying[commit.barrier] and place < at
        )
        last = max(told, default=-1)
        return [event for place, event in self.products if last < place < at]

    def private_steps(self, shared: Cells) -> frozenset[int]:
        """Steps that no other role can tell: they touch no barrier and nothing shared, nor let go of it."""
        return frozenset(
            begin
            for begin, end in self.ends.items()
            if not self.touched[begin]
            and all(_cells_of(event).isdisjoint(shared) for event in self.events[begin:end])
            and len({held.of(shared) for held in self.held[begin : end + 1]}) == 1
        )


def _barriers_of(event: TraceEvent, block_of: Sequence[int | None]) -> Sequence[int]:
    if isinstance(event, BlockEnd):
        return [barrier for barrier, block in enumerate(block_of) if block == event.block]
    kinds = (Init, Invalidate, Wait, Expect, Arrive, CopyIn, Commit)
    return [event.barrier] if isinstance(event, kinds) else []


def _cells_of(event: TraceEvent) -> Cells:
    views = event.views if isinstance(event, (Multiply, TensorMultiply)) else (getattr(event, "view", None),)
    if isinstance(event, TensorMultiply):
        views = (*event.views, *event.sums)
    return frozenset(cell for view in views if view for cell in view.cells)


def _steps(events: Sequence[TraceEvent]) -> list[tuple[int, int]]:
    begins = [
        at
        for at, event in enumerate(events)
        if at == 0 or isinstance(event, Wait) or (_arrives(events[at - 1]) and not _arrives(event))
    ]
    return list(zip(begins, [*begins[1:], len(events)], strict=False))  # of no events: none


def _arrives(event: TraceEvent) -> bool:
    """Whether it can complete a phase by itself: who expects bytes has yet to see them land."""
    return isinstance(event, Arrive) or (isinstance(event, Expect) and event.nbytes <= 0)


def _private_steps(tracks: tuple[Track, ...]) -> tuple[frozenset[int], ...]:
    touching = Counter(cell for track in tracks for cell in track.cells)
    shared = frozenset(cell for cell, roles in touching.items() if roles > 1)
    return tuple(track.private_steps(shared) for track in tracks)


class TraceProgram:
    """A trace, as `steps` goes through it."""

    def __init__(self, trace: Trace) -> None:
        self.segments = tuple(
            tuple(Track(role, trace.block_of) for role in segment) for segment in trace.segments
        )
        self.private = tuple(_private_steps(tracks) for tracks in self.segments)
        self.barriers, self.cells = trace.barriers, trace.cells
        self.arrivals, self.ends, self.block_of = dict(trace.arrivals), trace.ends, trace.block_of
        events = [event for tracks in self.segments for track in tracks for event in track.events]
        self.copies = {event.number: event for event in events if isinstance(event, (CopyIn, Commit))}
        self.where = {event.number: event.where for event in events}
