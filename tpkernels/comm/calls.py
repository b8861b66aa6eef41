"""The calls of a group, numbered: ranks that part ways find out, and a broken call ends its group.

All ranks of a group make the same calls in the same order. So a call's number and description, such as
"row_linear: sum of (64, 128) float32", are the same on all of them, and every message bears both: as its tag
where it is sent point to point, in its flag where memory is shared. A message of one call is never taken for
that of another. A rank that waits for long shows the others its last calls, see `watch`.

After an exception in the middle of a call nobody can say which messages are on their way. The group has
failed then: the cause is put into its store, its connections are closed, so that nobody waits in vain, and
every later call on it is an error on all ranks that names the first cause.
"""

from __future__ import annotations

import atexit
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from time import monotonic
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, Store, distributed_c10d

from tpkernels.comm.lifetime import note_use
from tpkernels.comm.watch import PATIENCE, Watcher, parting, shown

P = ParamSpec("P")
R = TypeVar("R")

REMEMBERED = 64  # calls, which ranks compare
MOST_COMPARED = 256  # descriptions of calls, each before it is first made
LONGEST_CAUSE = 2000  # characters
_FAILURE, _RECENT = "tpkernels failure", "tpkernels calls of rank "
_NEVER_SENT = 2**31 - 1  # a tag


class GroupCalls:
    """What this rank knows of the calls of one group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._registered_name = group.group_name
        self.name, self.rank, self.ranks = str(group.group_name), group.rank(), group.size()
        self.failure = ""  # why nobody may use the group any more
        self.waiting_since: float | None = None  # on the monotonic clock, while this rank is blocked
        self._number = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._group = ref(group)  # its threads end with it, see `lifetime`
        self._matches_tags: dict[str, bool] = {}
        self._made: set[str] = set()

    def require_usable(self, op: str) -> None:
        """An error if the group was destroyed, has failed, or is another process's."""
        if self.failure:
            raise RuntimeError(
                f"{op}: process group '{self.name}' has failed and cannot be used any more: {self.failure}. "
                "Destroy it and make a new one, on all ranks"
            )
        if not self._is_alive():
            raise RuntimeError(f"{op}: process group '{self.name}' was destroyed; make a new one")

    def next(self, what: str) -> int:
        """The number of a call that begins."""
        self._number += 1
        self._recent.append((self._number, what))
        return self._number

    def matches_tags(self, device: torch.device) -> bool:
        """Whether the backend delivers a message only to who asks for its tag. NCCL goes by order alone."""
        kind = device.type
        if kind not in self._matches_tags:
            self._matches_tags[kind] = self._required_group()._get_backend(device).name() == "gloo"
        return self._matches_tags[kind]

    def is_new(self, described: str) -> bool:
        """Whether a call of this description is made for the first time; of too many nobody keeps count."""
        new = described not in self._made and len(self._made) < MOST_COMPARED
        if new:
            self._made.add(described)
        return new

    def fail(self, cause: str) -> None:
        """Let nobody use the group any more, here and on other ranks; the first cause stays."""
        if self.failure:
            return
        cause = f"rank {self.rank}: {cause}"[:LONGEST_CAUSE]
        self.failure = cause
        with suppress(RuntimeError):  # a store may have died with its rank
            if (store := self._store()) is not None:
                self.failure = store.compare_set(_FAILURE, "", cause).decode()
        self._close_connections()

    def first_failure(self) -> str:
        """What another rank has said by `fail`, if any has."""
        if not self.failure:
            with suppress(RuntimeError):
                if (store := self._store()) is not None and store.check([_FAILURE]):
                    return store.get(_FAILURE).decode()
        return self.failure

    def compare(self) -> None:
        """Show our last calls, look at those of other ranks, and fail if they have made others."""
        if (store := self._store()) is None or self.failure:
            return
        recent = list(self._recent)
        store.set(f"{_RECENT}{self.rank}", shown(recent))
        others = {}
        for rank in range(self.ranks):
            key = f"{_RECENT}{rank}"
            if rank != self.rank and store.check([key]):
                others[rank] = store.get(key)
        if cause := self.first_failure() or parting(self.rank, recent, others):
            self.fail(cause)

    def _close_connections(self) -> None:
        """Those of gloo, by a wait that runs out at once: nothing else wakes the ranks that wait for us."""
        group, cpu = self._group(), torch.device("cpu")
        if group is None or self.ranks == 1 or not self._is_alive():
            return
        with suppress(RuntimeError):
            if self.matches_tags(cpu):
                nothing = torch.empty(1, dtype=torch.uint8)
                received = group.recv([nothing], (self.rank + 1) % self.ranks, _NEVER_SENT)
                received.wait(timedelta(milliseconds=1))

    def _is_alive(self) -> bool:
        try:
            return c10d._resolve_process_group(self._registered_name) is self._group()
        except RuntimeError:
            return False

    def _store(self) -> Store | None:
        group = self._group()
        return distributed_c10d._world.pg_map[group][1] if group in distributed_c10d._world.pg_map else None

    def _required_group(self) -> ProcessGroup:
        group = self._group()
        assert group is not None, "a call keeps its group"
        return group


_of_group: WeakKeyDictionary[ProcessGroup, GroupCalls] = WeakKeyDictionary()


def calls_of(group: ProcessGroup) -> GroupCalls:
    found = _of_group.get(group)
    if found is None:
        found = _of_group[group] = GroupCalls(group)
        note_use(group)
        if found.ranks > 1:
            _watcher.start()
    return found


def _look_at_those_that_wait() -> None:
    for calls in list(_of_group.values()):
        since = calls.waiting_since
        if since is not None and monotonic() - since > PATIENCE:
            with suppress(RuntimeError):  # a store may have died with its rank
                calls.compare()


_watcher = Watcher(_look_at_those_that_wait)
atexit.register(_watcher.end)


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a group."""

    op: str
    group: ProcessGroup
    calls: GroupCalls
    tag: int  # of its messages: 31 bits that hardly another call has

    def wait_for(self, wait: Callable[[], R]) -> R:
        """Block in `wait`, watched."""
        self.calls.waiting_since = monotonic()
        try:
            return wait()
        finally:
            self.calls.waiting_since = None


class _Begun(threading.local):
    """The groups of the calls begun by the function that `all_or_fail` runs in this thread."""

    groups: list[GroupCalls] | None = None


_begun = _Begun()


def begin(op: str, what: str, group: ProcessGroup) -> Call:
    """The next call of the group, in which rows travel."""
    call = _next(op, f"{op}: {what}", group)
    if _begun.groups is not None:
        _begun.groups.append(call.calls)
    return call


def handshake(op: str, what: str, group: ProcessGroup) -> Call:
    """The next call of the group, in which ranks tell each other what they want: all succeed, or none.

    op: for errors; ranks may be there for different ones
    """
    return _next(op, what, group)


def _next(op: str, described: str, group: ProcessGroup) -> Call:
    calls = calls_of(group)
    calls.require_usable(op)
    return Call(op, group, calls, tag_of(described, calls.next(described)))


def tag_of(described: str, number: int) -> int:
    """A number below 2**31 - 1 that calls of another description or number hardly share."""
    return (zlib.crc32(described.encode()) ^ number * 0x9E3779B1) % _NEVER_SENT


def all_or_fail(function: Callable[P, R]) -> Callable[P, R]:
    """Let the groups fail in which `function` has begun calls, if it ends by an exception."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        begun: list[GroupCalls] = []
        outer, _begun.groups = _begun.groups, begun
        try:
            return function(*args, **options)
        except BaseException as error:
            for calls in begun:
                calls.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            if outer is not None:
                outer.extend(begun)
            _begun.groups = outer

    return run


def _disown_groups_of_parent() -> None:
    """A forked child has none of the threads that move rows."""
    for group in {*_of_group, *distributed_c10d._world.pg_map}:
        calls = _of_group[group] = GroupCalls(group)
        calls.failure = (
            f"it was made in process {os.getppid()}, of which this process {os.getpid()} is a fork; make "
            "process groups after the fork"
        )


os.register_at_fork(after_in_child=_disown_groups_of_parent)
