"""Goes through every order in which a recorded program can run."""

from __future__ import annotations

from collections.abc import Iterator

from tpkernels.gate.machine.events import Trace
from tpkernels.gate.machine.faults import Fault
from tpkernels.gate.machine.program import Program
from tpkernels.gate.machine.steps import State, Steps, Writers

MAX_STATES = 2_000_000


def expectations(trace: Trace) -> dict[int, Writers]:
    """What each read finds when copies land at once and the roles go on in turn."""
    expected: dict[int, Writers] = {}
    steps = Steps(Program(trace), expected, learning=True)
    state, path, turn = steps.settle(steps.start()), [], 0
    try:
        while True:
            if landing := steps.landing(state):
                state, _ = steps.land(state, landing[0])
            elif roles := steps.ready(state):
                turn += 1
                role = roles[turn % len(roles)]
                path.append(_step(steps, state, role))
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
    steps = Steps(Program(trace), expectations(trace) if expected is None else expected, learning=False)
    first = steps.settle(steps.start())
    came_from: dict[State, tuple[State, str] | None] = {first: None}
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


def _successors(steps: Steps, state: State) -> Iterator[tuple[str, State]]:
    private = steps.private(state)
    if private is not None:  # the others find the same before it as after it
        yield _step(steps, state, private), steps.advance(state, private)[0]
        return
    for barrier in steps.landing_matters(state):
        after, landed = steps.land(state, barrier)
        yield f"the copies {landed} land", after
    for role in steps.ready(state):
        yield _step(steps, state, role), steps.advance(state, role)[0]


def _step(steps: Steps, state: State, role: int) -> str:
    track = steps.program.segments[state.segment][role]
    return f"{track.name} goes on at {track.events[state.at[role]].where}"


def _path_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> tuple[str, ...]:
    path = []
    while (before := came_from[state]) is not None:
        state, doing = before
        path.append(doing)
    return tuple(reversed(path))
