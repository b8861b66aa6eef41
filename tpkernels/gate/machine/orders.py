"""A recorded program in one order of events, values and all, or in every order, without values."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tpkernels.gate.machine.events import (
    Commit,
    CopyIn,
    CopyOut,
    Global,
    Load,
    Multiply,
    MultiplyWait,
    Store,
    StoreWait,
    TensorMultiply,
    Trace,
    TraceEvent,
)
from tpkernels.gate.machine.faults import Fault
from tpkernels.gate.machine.memory import Written
from tpkernels.gate.machine.program import TraceProgram
from tpkernels.gate.machine.steps import OrderState, Steps, Writers

MAX_STATES = 2_000_000  # that a search goes through


@dataclass(frozen=True)
class Schedule:
    """Who goes on first, and when what is asynchronous happens."""

    landing: Literal["early", "late", "random"] = "random"  # of copies in
    reading: Literal["early", "late", "random"] = "random"  # by products, and by copies out
    starved: int | None = None  # this role goes on only if no other can
    seed: int = 0


EAGER = Schedule("early", "early")
SCHEDULES: dict[str, Schedule] = {
    "eager": EAGER,
    "late loads": Schedule("late", "late"),
    "late reads": Schedule("early", "late"),
    "first role starved": Schedule("early", "late", starved=0),
    "second role starved": Schedule("early", "late", starved=1),
    "third role starved": Schedule("late", "late", starved=2),
    **{f"random {seed}": Schedule(seed=seed) for seed in range(2)},
}


class Emulator:
    """One program under one schedule."""

    def __init__(self, trace: Trace, schedule: Schedule, written: Written) -> None:
        self.program = TraceProgram(trace)
        self.expected: dict[int, Writers] = {}  # what each read finds in this order
        self._steps = Steps(self.program, self.expected, learning=True)
        self._schedule, self._written = schedule, written
        self._random = random.Random(schedule.seed)
        self._multiplying: dict[tuple[int, int], deque[Multiply]] = {}  # of each segment and role
        self._storing: dict[tuple[int, int], deque[CopyOut]] = {}
        self._products: dict[tuple[int, int], deque[TensorMultiply]] = {}
        self._committed_by: dict[int, tuple[int, int]] = {}
        self._was_read: set[int] = set()
        self._path: list[str] = []

    def run(self) -> None:
        state = self._steps.settle(self._steps.start())
        try:
            while moves := self._moves(state):
                state = self._random.choice(moves)()
            self._steps.require_done(state)
        except Fault as fault:
            fault.path = tuple(self._path)
            raise

    def _moves(self, state: OrderState) -> Sequence[Callable[[], OrderState]]:
        """What may happen next under this schedule."""
        roles = self._steps.ready(state)
        roles = [role for role in roles if role != self._schedule.starved] or roles
        goes = [partial(self._advance, state, role) for role in roles]
        lands = [partial(self._land, state, barrier) for barrier in self._steps.landing(state)]
        if self._schedule.landing == "random":
            return goes + lands
        return (lands or goes) if self._schedule.landing == "early" else (goes or lands)

    def _advance(self, state: OrderState, role: int) -> OrderState:
        self._path.append(self._steps.going_on(state, role))
        after, events = self._steps.advance(state, role)
        for event in events:
            self._carry_out(event, (state.segment, role))
        return after

    def _land(self, state: OrderState, barrier: int) -> OrderState:
        after, landed = self._steps.land(state, barrier)
        for number in landed:
            copy = self.program.copies[number]
            self._path.append(f"the {type(copy).__name__} of {copy.where} lands")
            if isinstance(copy, CopyIn):
                copy.land()
            else:
                self._complete(number)
        return after

    def _carry_out(self, event: TraceEvent, who: tuple[int, int]) -> None:
        if isinstance(event, CopyIn):
            event.view.put(float("nan"))  # until it lands
        elif isinstance(event, (Load, Store)):
            event.effect()
        elif isinstance(event, Global):
            event.effect(self._written)
        elif isinstance(event, Multiply):
            self._multiplying.setdefault(who, deque()).append(event)
            self._maybe_read(event)
        elif isinstance(event, TensorMultiply):
            self._products.setdefault(who, deque()).append(event)
            for view in () if event.adds else event.sums:
                view.put(float("nan"))
            self._maybe_read(event)
        elif isinstance(event, Commit):
            self._committed_by[event.number] = who
        elif isinstance(event, CopyOut):
            self._storing.setdefault(who, deque()).append(event)
            self._maybe_read(event)
        elif isinstance(event, MultiplyWait):
            products = self._multiplying.get(who, deque())
            while len(products) > event.pending:
                product = products.popleft()
                self._read(product)
                product.finish()
        elif isinstance(event, StoreWait):
            stores = self._storing.get(who, deque())
            while len(stores) > event.pending:
                store = stores.popleft()
                self._read(store)
                store.write(self._written)

    def _complete(self, commit: int) -> None:
        """All products that the same role started before."""
        products = self._products.get(self._committed_by[commit], deque())
        while products and products[0].number < commit:
            product = products.popleft()
            self._read(product)
            product.finish()

    def _maybe_read(self, event: Multiply | TensorMultiply | CopyOut) -> None:
        early = self._schedule.reading == "early"
        if early or (self._schedule.reading == "random" and self._random.random() < 0.5):
            self._read(event)

    def _read(self, event: Multiply | TensorMultiply | CopyOut) -> None:
        if event.number not in self._was_read:
            self._was_read.add(event.number)
            event.read()


def expectations(trace: Trace) -> dict[int, Writers]:
    """What each read finds when copies land at once and the roles go on in turn."""
    expected: dict[int, Writers] = {}
    steps = Steps(TraceProgram(trace), expected, learning=True)
    state, path, turn = steps.settle(steps.start()), [], 0
    try:
        while True:
            if landing := steps.landing(state):
                state, _ = steps.land(state, landing[0])
            elif roles := steps.ready(state):
                turn += 1
                role = roles[turn % len(roles)]
                path.append(steps.going_on(state, role))
                state, _ = steps.advance(state, role)
            else:
                steps.require_done(state)
                return expected
    except Fault as fault:
        fault.path = tuple(path)
        raise


def search(trace: Trace, expected: dict[int, Writers] | None = None) -> int:
    """How many states a program can be in; a `Fault`, if any order of steps leads to one.

    expected: what each read is to find; by default what it finds in the simplest order
    """
    steps = Steps(TraceProgram(trace), expectations(trace) if expected is None else expected, learning=False)
    first = steps.settle(steps.start())
    came_from: dict[OrderState, tuple[OrderState, str] | None] = {first: None}
    open_states = [first]
    while open_states:
        state = open_states.pop()
        reached, doing = False, ""
        try:
            for doing, after in _successors(steps, state):
                reached = True
                if after not in came_from:
                    came_from[after] = state, doing
                    open_states.append(after)
            if not reached:
                steps.require_done(state)
        except Fault as fault:
            fault.path = _path_to(state, came_from)
            raise
        if len(came_from) > MAX_STATES:
            raise ValueError(f"more than {MAX_STATES} states: search smaller sizes")
    return len(came_from)


def _successors(steps: Steps, state: OrderState) -> Iterator[tuple[str, OrderState]]:
    private = steps.private(state)
    if private is not None:  # the others find the same before it as after it
        yield steps.going_on(state, private), steps.advance(state, private)[0]
        return
    for barrier in steps.landing_matters(state):
        after, landed = steps.land(state, barrier)
        yield f"the copies {landed} land", after
    for role in steps.ready(state):
        yield steps.going_on(state, role), steps.advance(state, role)[0]


def _path_to(
    state: OrderState, came_from: dict[OrderState, tuple[OrderState, str] | None]
) -> tuple[str, ...]:
    path = []
    while (before := came_from[state]) is not None:
        state, doing = before
        path.append(doing)
    return tuple(reversed(path))
