"""Planted faults of Gluon kernels: edits of their source, and of a trace, which the machine must find.

Each mutant of a trace edits all events of one source line, or the first or last of them, as a slip of whoever
writes the kernel would. Edits that change nothing are left out: a fence that nothing needs, a barrier that
nobody waits for. A program has to use each ring more often than it has buffers, and its roles must be able to
run ahead of each other by a turn of each ring: else some of the others change nothing, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import getsource
from itertools import pairwise
from types import CodeType, ModuleType

import pytest

from tpkernels.gate import machine
from tpkernels.gate.machine.events import (
    Arrive,
    CopyIn,
    Expect,
    Fence,
    Init,
    Load,
    MultiplyWait,
    Role,
    Store,
    StoreWait,
    Trace,
    TraceEvent,
    Wait,
)


@contextmanager
def edited(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """Kernels of the module run with `new` in place of `old`, which its source must hold once."""
    source = getsource(module)
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times: {old}"
    compiled = compile(source.replace(old, new), str(module.__file__), "exec", dont_inherit=True)
    codes = {code.co_name: code for code in compiled.co_consts if isinstance(code, CodeType)}
    with pytest.MonkeyPatch.context() as patch:
        for kernel in vars(module).values():
            if hasattr(kernel, "fn") and kernel.fn.__module__ == module.__name__:
                patch.setattr(kernel.fn, "__code__", codes[kernel.fn.__name__])
        yield


Edit = Callable[[TraceEvent], TraceEvent | None]


@dataclass(frozen=True)
class Mutant:
    kind: str
    where: str
    trace: Trace

    @property
    def name(self) -> str:
        return f"{self.kind} ({self.where})"


def mutants(trace: Trace) -> Iterator[Mutant]:
    """All of a sound trace."""
    awaited = {event.barrier for event in _all(trace) if isinstance(event, Wait)}
    releases = _releases(trace)
    needed = {event for role in _roles(trace) for event in _needed_fences(role)}
    for slip in _SLIPS:
        for where, events in _lines(trace, slip.of):
            chosen = slip.choose(events)
            if slip.of is Init:
                chosen = [event for event in chosen if isinstance(event, Init) and event.barrier in awaited]
            if slip.of is Fence:
                chosen = [event for event in chosen if event in needed]
            if chosen:
                yield Mutant(slip.kind, where, _edited(trace, chosen, slip.edit))
    for where, events in _lines(trace, Arrive):
        if any(isinstance(event, Arrive) and event.barrier in releases for event in events):
            yield Mutant("released a step early", where, _moved_up(trace, events))


def _roles(trace: Trace) -> Iterator[Role]:
    return (role for segment in trace.segments for role in segment)


def _all(trace: Trace) -> Iterator[TraceEvent]:
    return (event for role in _roles(trace) for event in role.events)


def _lines(trace: Trace, kind: type[TraceEvent]) -> list[tuple[str, list[TraceEvent]]]:
    """The events of a kind, by source line."""
    lines: dict[str, list[TraceEvent]] = {}
    for event in _all(trace):
        if isinstance(event, kind):
            lines.setdefault(event.where, []).append(event)
    return list(lines.items())


def _releases(trace: Trace) -> set[int]:
    """The barriers for which somebody waits before a copy in."""
    found = set()
    for role in _roles(trace):
        for event, after in pairwise(role.events):
            if isinstance(event, Wait) and isinstance(after, Expect):
                found.add(event.barrier)
    return found


def _needed_fences(role: Role) -> Iterator[TraceEvent]:
    """The fences that follow a store or a load."""
    touched = False
    for event in role.events:
        touched |= isinstance(event, (Store, Load))
        if isinstance(event, Fence) and touched:
            yield event
            touched = False


def named(trace: Trace, names: Container[str] | None = None) -> Iterator[tuple[str, Trace]]:
    """The mutants of a trace, or those of these names."""
    return ((one.name, one.trace) for one in mutants(trace) if names is None or one.name in names)


def faults_of(trace: Trace, every: Iterable[tuple[str, Trace]]) -> dict[str, str]:
    """Of each mutant of a trace, by name: the kind of fault that the search finds, or none."""
    expected, found = machine.expectations(trace), {}
    for name, mutant in every:
        try:
            machine.search(mutant, expected)
            found[name] = "none"
        except machine.Fault as fault:
            found[name] = type(fault).__name__
    return found


def _rewritten(trace: Trace, edit: Callable[[Role], Sequence[TraceEvent]]) -> Trace:
    segments = tuple(
        tuple(Role(role.name, tuple(edit(role))) for role in segment) for segment in trace.segments
    )
    return replace(trace, segments=segments)


def _edited(trace: Trace, events: Sequence[TraceEvent], edit: Edit) -> Trace:
    """The trace with these events edited; those of which nothing is left are dropped."""
    chosen = set(events)

    def of(role: Role) -> list[TraceEvent]:
        edited = (edit(event) if event in chosen else event for event in role.events)
        return [event for event in edited if event is not None]

    return _rewritten(trace, of)


def _moved_up(trace: Trace, events: Sequence[TraceEvent]) -> Trace:
    """The trace with these events before the read, or the wait for a read, that each follows."""
    chosen = set(events)

    def of(role: Role) -> list[TraceEvent]:
        moved: list[TraceEvent] = []
        for event in role.events:
            at = len(moved)
            if event in chosen:
                reads = [i for i, other in enumerate(moved) if isinstance(other, (MultiplyWait, Load))]
                at = reads[-1] if reads else at
            moved.insert(at, event)
        return moved

    return _rewritten(trace, of)


def _dropped(event: TraceEvent) -> None:
    return None


def _other_parity(event: TraceEvent) -> TraceEvent:
    assert isinstance(event, Wait)
    return replace(event, parity=1 - event.parity)


def _expects(more: int) -> Edit:
    def edit(event: TraceEvent) -> TraceEvent:
        assert isinstance(event, Expect)
        return replace(event, nbytes=event.nbytes + more)

    return edit


def _one_more(event: TraceEvent) -> TraceEvent:
    assert isinstance(event, Init)
    return replace(event, count=event.count + 1)


@dataclass(frozen=True)
class _Slip:
    """An edit of the events of a kind on one line."""

    kind: str
    of: type[TraceEvent]
    edit: Edit
    choose: Callable[[list[TraceEvent]], list[TraceEvent]] = list


_SLIPS = (
    _Slip("arrive dropped", Arrive, _dropped),
    _Slip("wait dropped", Wait, _dropped),
    _Slip("parity of the first wait wrong", Wait, _other_parity, lambda events: events[:1]),
    _Slip("parity of the last wait wrong", Wait, _other_parity, lambda events: events[-1:]),
    _Slip("expects too little", Expect, _expects(-16)),
    _Slip("expects too much", Expect, _expects(16)),
    _Slip("expect dropped", Expect, _dropped),
    _Slip("copy dropped", CopyIn, _dropped),
    _Slip("store_wait dropped", StoreWait, _dropped),
    _Slip("fence dropped", Fence, _dropped),
    _Slip("wait for products dropped", MultiplyWait, _dropped),
    _Slip("one more arrival at init", Init, _one_more),
)
