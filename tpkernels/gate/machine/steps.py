"""What a step does to barriers and shared memory, and what it must not do: the rules of the machine.

A state is a value; the search keeps many, the emulator one. Values of tensors are not part of it.

An mbarrier's phase completes when no arrivals and no bytes are missing; `wait(parity)` goes on while the
phase under way is of the other parity, so that wait(1) passes a fresh barrier. A copy in flight lands at any
time; copies of one barrier land in order, which nobody can tell from any other order before the phase ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpkernels.gate.machine.events import (
    Arrive,
    BlockEnd,
    Commit,
    CopyIn,
    CopyOut,
    Expect,
    Init,
    Invalidate,
    Load,
    Multiply,
    Store,
    TensorMultiply,
    TraceEvent,
    Wait,
)
from tpkernels.gate.machine.faults import Deadlock, Misuse, Race, Undrained
from tpkernels.gate.machine.memory import View
from tpkernels.gate.machine.program import TraceProgram, Track

NOTHING = -1  # what a cell holds before anything is written
Writers = tuple[int, ...]  # the events that wrote each cell of a view


class Barrier(NamedTuple):
    arrivals: int  # that a phase takes
    phase: int = 0
    missing: int = 0  # arrivals
    nbytes: int = 0


class OrderState(NamedTuple):
    segment: int
    at: tuple[int, ...]  # of each role: the event that it does next
    barriers: tuple[Barrier | None, ...]
    flying: tuple[tuple[int, ...], ...]  # of each barrier: its copies in flight, and commits
    contents: Writers  # of each cell


@dataclass
class _Now:
    """A state while one role does a step."""

    tracks: tuple[Track, ...]
    role: int
    at: list[int]
    barriers: list[Barrier | None]
    flying: list[tuple[int, ...]]
    contents: list[int]

    @property
    def who(self) -> str:
        return self.tracks[self.role].name

    def multiplying(self) -> list[TensorMultiply]:
        """The products of tensor cores that may still read and write."""
        return [
            product
            for track, at in zip(self.tracks, self.at, strict=True)
            if track.products
            for product in track.multiplying(at, self.flying)
        ]


class Steps:
    """Steps of a program; `expected`: what each read is to find, or an empty dictionary that learns it."""

    def __init__(self, program: TraceProgram, expected: dict[int, Writers], *, learning: bool) -> None:
        self.program, self.expected, self.learning = program, expected, learning

    def start(self) -> OrderState:
        program = self.program
        return OrderState(
            0,
            (0,) * len(program.segments[0]),
            tuple(
                Barrier(count, 0, count) if (count := program.arrivals.get(number)) else None
                for number in range(len(program.barriers))
            ),
            ((),) * len(program.barriers),
            (NOTHING,) * len(program.cells),
        )

    def ready(self, state: OrderState) -> list[int]:
        """The roles that can go on."""
        tracks = self.program.segments[state.segment]
        return [role for role, track in enumerate(tracks) if self._can_go_on(state, track, state.at[role])]

    def _can_go_on(self, state: OrderState, track: Track, at: int) -> bool:
        if at == len(track.events):
            return False
        event = track.events[at]
        if not isinstance(event, Wait):
            return True
        return self._barrier(state.barriers, event.barrier, event).phase & 1 != event.parity

    def landing(self, state: OrderState) -> list[int]:
        """The barriers whose copies can land."""
        return [barrier for barrier, copies in enumerate(state.flying) if copies]

    def landing_matters(self, state: OrderState) -> list[int]:
        """Of those, the barriers that the next step of some role touches: all, if no role can go on.

        That is enough to find what can happen. To land later changes nothing for a step that does not touch
        the barrier, unless it touches the buffer: then it finds the copy in flight, which is a fault.
        """
        landing = self.landing(state)
        if not self.ready(state):
            return landing
        tracks = self.program.segments[state.segment]
        steps = (track.touched.get(at, frozenset()) for at, track in zip(state.at, tracks, strict=True))
        touched = frozenset().union(*steps)
        return [barrier for barrier in landing if barrier in touched]

    def private(self, state: OrderState) -> int | None:
        """A role whose next step no other role can tell, if there is one."""
        private = self.program.private[state.segment]
        return next((role for role, at in enumerate(state.at) if at in private[role]), None)

    def settle(self, state: OrderState) -> OrderState:
        """The next segment, if all roles of this one are done."""
        tracks = self.program.segments[state.segment]
        while all(at == len(track.events) for at, track in zip(state.at, tracks, strict=True)):
            for track in tracks:
                self._require_drained(track)
            if state.segment + 1 == len(self.program.segments):
                break
            tracks = self.program.segments[state.segment + 1]
            state = state._replace(segment=state.segment + 1, at=(0,) * len(tracks))
        return state

    def finished(self, state: OrderState) -> bool:
        tracks = self.program.segments[-1]
        last = state.segment + 1 == len(self.program.segments)
        return last and all(at == len(track.events) for at, track in zip(state.at, tracks, strict=True))

    def going_on(self, state: OrderState, role: int) -> str:
        """The next step of a role, in words."""
        track = self.program.segments[state.segment][role]
        return f"{track.name} goes on at {track.events[state.at[role]].where}"

    def advance(self, state: OrderState, role: int) -> tuple[OrderState, Sequence[TraceEvent]]:
        """One step of a role, and what it did."""
        tracks = self.program.segments[state.segment]
        begin = state.at[role]
        end = tracks[role].ends[begin]
        now = _Now(
            tracks, role, list(state.at), list(state.barriers), list(state.flying), list(state.contents)
        )
        for event in tracks[role].events[begin:end]:
            self._do(now, event)
            now.at[role] += 1
        after = OrderState(
            state.segment, tuple(now.at), tuple(now.barriers), tuple(now.flying), tuple(now.contents)
        )
        return self.settle(after), tracks[role].events[begin:end]

    def land(self, state: OrderState, barrier: int) -> tuple[OrderState, tuple[int, ...]]:
        """The copies of a barrier land, until its phase completes."""
        copies = state.flying[barrier]
        one = before = self._barrier(state.barriers, barrier, self.program.copies[copies[0]])
        self._require_running(state.barriers, barrier, self.program.copies[copies[0]])
        landed = 0
        while landed < len(copies) and one.phase == before.phase:
            copy = self.program.copies[copies[landed]]
            if isinstance(copy, Commit):
                one = _completed(one._replace(missing=one.missing - 1))
            else:
                one = _completed(one._replace(nbytes=one.nbytes - copy.nbytes))
            landed += 1
        barriers = (*state.barriers[:barrier], one, *state.barriers[barrier + 1 :])
        flying = (*state.flying[:barrier], copies[landed:], *state.flying[barrier + 1 :])
        return state._replace(barriers=barriers, flying=flying), copies[:landed]

    def _do(self, now: _Now, event: TraceEvent) -> None:
        if isinstance(event, BlockEnd):
            self._end(now, event)
        elif isinstance(event, Init):
            if now.barriers[event.barrier] is not None:
                raise Misuse(f"{event.where}: {self._name(event.barrier)} is initialised again")
            now.barriers[event.barrier] = Barrier(event.count, 0, event.count)
        elif isinstance(event, Invalidate):
            self._require_idle(now, event)
            now.barriers[event.barrier] = None
        elif isinstance(event, Arrive):
            self._arrive(now, event, event.barrier, event.count, 0)
        elif isinstance(event, Expect):
            if event.nbytes >= 2**20:
                most = f"a phase can wait for at most {2**20 - 1} bytes"
                raise Misuse(f"{event.where}: {most}, not {event.nbytes}")
            self._arrive(now, event, event.barrier, 1, event.nbytes)
        elif isinstance(event, CopyIn):
            self._barrier(now.barriers, event.barrier, event)
            self._require_running(now.barriers, event.barrier, event)
            self._write(now, event, event.view)
            now.flying[event.barrier] = (*now.flying[event.barrier], event.number)
        elif isinstance(event, Commit):
            self._barrier(now.barriers, event.barrier, event)
            self._require_running(now.barriers, event.barrier, event)
            now.flying[event.barrier] = (*now.flying[event.barrier], event.number)
        elif isinstance(event, Store):
            self._write(now, event, event.view)
        elif isinstance(event, (Load, CopyOut)):
            self._read(now, event, event.view.cells)
        elif isinstance(event, Multiply):
            self._read(now, event, tuple(cell for view in event.views for cell in view.cells))
        elif isinstance(event, TensorMultiply):
            sums = tuple(cell for view in event.sums for cell in view.cells)
            operands = tuple(cell for view in event.views for cell in view.cells)
            self._read(now, event, operands + sums * event.adds, in_order=sums)
            for cell in sums:
                now.contents[cell] = event.number

    def _arrive(self, now: _Now, event: TraceEvent, number: int, count: int, nbytes: int) -> None:
        before = self._barrier(now.barriers, number, event)
        self._require_running(now.barriers, number, event)
        if count > before.missing:
            raise Misuse(
                f"{event.where}: {now.who} arrives {count} times at {self._name(number)}, which misses "
                f"{_missing(before)}"
            )
        after = before._replace(missing=before.missing - count, nbytes=before.nbytes + nbytes)
        now.barriers[number] = _completed(after)

    def _end(self, now: _Now, event: BlockEnd) -> None:
        for barrier, block in enumerate(self.program.block_of):
            if block == event.block and now.flying[barrier]:
                raise Undrained(
                    f"block {block} ends while {self._flight(now.flying[barrier][0])} is in flight"
                )
        for product in now.multiplying():
            for view in (*product.views, *product.sums):
                if view.allocation.others.index(view.allocation) == event.block:
                    raise Undrained(
                        f"block {event.block} ends while {product.where} may still use {view.name}"
                    )
        end = self.program.ends[event.block]
        now.barriers[end] = _completed(self._barrier(now.barriers, end, event)._replace(missing=0))

    def _require_running(self, barriers: Sequence[Barrier | None], number: int, event: TraceEvent) -> None:
        """That the block in which a barrier lies has not ended."""
        block = self.program.block_of[number] if self.program.block_of else None
        if block is not None and self._barrier(barriers, self.program.ends[block], event).phase:
            raise Misuse(f"{event.where}: {self._name(number)} is used, but block {block} may have ended")

    def _read(self, now: _Now, event: TraceEvent, cells: Sequence[int], in_order: Sequence[int] = ()) -> None:
        """in_order: cells that only what comes before in the same queue may still write"""
        found = tuple(now.contents[cell] for cell in cells)
        in_flight = {number for copies in now.flying for number in copies}
        in_flight |= {product.number for product in now.multiplying()}
        if not isinstance(event, Load):
            self._require_fenced(now, event, cells)
        if self.learning:
            self.expected[event.number] = found
        for cell, writer, wanted in zip(cells, found, self.expected[event.number], strict=True):
            if writer == wanted != NOTHING and (writer not in in_flight or cell in in_order):
                continue
            who = f"{event.where}: {now.who} reads {self.program.cells[cell]}"
            if writer == NOTHING:
                raise Race(f"{who} before anything is written there")
            if writer in in_flight:
                raise Race(f"{who} before {self._flight(writer)} has landed")
            raise Race(f"{who} and finds what {self._source(writer)} wrote, not {self._source(wanted)}")

    def _write(self, now: _Now, event: TraceEvent, view: View) -> None:
        for track, at in zip(now.tracks, now.at, strict=True):
            if not track.held[at].read.isdisjoint(view.cells):
                use = f"a product or copy of {track.name} may still read it"
                raise Race(f"{event.where}: {now.who} writes {view.name} while {use}")
        for number in (number for copies in now.flying for number in copies):
            copy = self.program.copies[number]
            if isinstance(copy, CopyIn) and not set(copy.view.cells).isdisjoint(view.cells):
                use = f"{self._flight(number)} is in flight"
                raise Race(f"{event.where}: {now.who} writes {view.name} while {use}")
        for product in now.multiplying():
            if any(not set(one.cells).isdisjoint(view.cells) for one in (*product.views, *product.sums)):
                use = f"the product of {product.where} may still use it"
                raise Race(f"{event.where}: {now.who} writes {view.name} while {use}")
        if isinstance(event, CopyIn):
            self._require_fenced(now, event, view.cells)
            for track, at in zip(now.tracks, now.at, strict=True):
                if not track.held[at].loaded.isdisjoint(view.cells):
                    raise Race(f"{event.where}: no fence between the loads of {track.name} and this copy")
        for cell in view.cells:
            now.contents[cell] = event.number

    def _require_fenced(self, now: _Now, event: TraceEvent, cells: Sequence[int]) -> None:
        for track, at in zip(now.tracks, now.at, strict=True):
            if not track.held[at].unfenced.isdisjoint(cells):
                raise Race(f"{event.where}: no fence after the stores of {track.name} to what is used here")

    def _require_drained(self, track: Track) -> None:
        held = track.held[-1]
        for what, queue in (("product", held.multiplied), ("TMA store", held.copied)):
            if queue:
                where = self._source(queue[0][0].number)
                raise Undrained(f"{track.name} ends with the {what} of {where} in flight")
        if track.products and track.products[-1][0] > max((at for at, _ in track.commits), default=-1):
            raise Undrained(f"{track.name} ends, and no commit tells of its last products")

    def _require_idle(self, now: _Now, event: Invalidate) -> None:
        barrier = self._barrier(now.barriers, event.barrier, event)
        if copies := now.flying[event.barrier]:
            flight = self._flight(copies[0])
            raise Undrained(f"{event.where}: {self._name(event.barrier)} goes while {flight} is in flight")
        if barrier.missing != barrier.arrivals or barrier.nbytes:
            raise Undrained(f"{event.where}: {self._name(event.barrier)} ends within a phase")

    def require_done(self, state: OrderState) -> None:
        """That a state in which nobody can go on is the end, with nothing left in flight."""
        if not self.finished(state):
            raise Deadlock("nobody can go on: " + "; ".join(self._blocked(state)))
        for number, (barrier, copies) in enumerate(zip(state.barriers, state.flying, strict=True)):
            if copies:
                raise Undrained(f"{self._flight(copies[0])} is in flight at the end")
            if barrier and (barrier.missing != barrier.arrivals or barrier.nbytes):
                raise Undrained(f"{self._name(number)} ends within a phase: it misses {_missing(barrier)}")

    def _blocked(self, state: OrderState) -> list[str]:
        told = []
        for track, at in zip(self.program.segments[state.segment], state.at, strict=True):
            if at < len(track.events):
                event = track.events[at]
                assert isinstance(event, Wait)
                barrier = self._barrier(state.barriers, event.barrier, event)
                told.append(
                    f"{track.name} waits at {event.where} for {self._name(event.barrier)}, parity "
                    f"{event.parity}, which misses {_missing(barrier)}"
                )
        return told

    def _barrier(self, barriers: Sequence[Barrier | None], number: int, event: TraceEvent) -> Barrier:
        barrier = barriers[number]
        if barrier is None:
            raise Misuse(f"{event.where}: {self._name(number)} is used without being initialised")
        return barrier

    def _name(self, barrier: int) -> str:
        return self.program.barriers[barrier]

    def _flight(self, number: int) -> str:
        copies = isinstance(self.program.copies.get(number), CopyIn)
        return f"the {'copy' if copies else 'product or commit'} of {self._source(number)}"

    def _source(self, number: int) -> str:
        return self.program.where.get(number, "nothing") if number != NOTHING else "nothing"


def _completed(barrier: Barrier) -> Barrier:
    if barrier.missing or barrier.nbytes:
        return barrier
    return Barrier(barrier.arrivals, barrier.phase + 1, barrier.arrivals)


def _missing(barrier: Barrier) -> str:
    arrivals = f"{barrier.missing} of {barrier.arrivals} arrivals"
    return f"{arrivals} and {barrier.nbytes} bytes in phase {barrier.phase}"
