"""Numbers the calls of a group: ranks whose calls differ raise an error, and a broken call ends its group.

All ranks of a group make the same calls in the same order. So a call's number and description, such as
"row_linear: sum of (64, 128) float32", are the same on all of them. Every message bears both: as its tag if
it is sent point to point, in its flag if memory is shared. A message of one call is never taken for that of
another. A rank that waits for long shows the others its last calls, see `watch`.

What sends nothing and must be alike all the same is noted: it takes a number, and a checksum of all notes is
in the tags of later calls. So ids that differ, or an op that one rank refuses, are told at the next message.

After an exception in the middle of a call no rank can know which messages are on their way. The group has
failed then: the cause is put into its store, and its connections are closed, so that no rank waits in vain.
Every later call on the group raises an error on all ranks, which names the first cause.

With NCCL the host never waits: a kernel does, for as long as the group's time-out. So the thread that
watches looks at the other ranks if this rank has begun no call since its last look: whether they have called
`fail`, their last calls, and whether their processes still run. It looks at processes of its own machine
directly, and at others by the signs of life that they give. If the group fails by that, its communicator is
aborted: kernels end, and the host no longer waits for them.

A destroyed group that is still held must end its threads before the interpreter ends: gloo's take Python's
lock to free a finished collective's tensors, and a thread that asks for the lock while the interpreter ends
aborts the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from inspect import signature
from itertools import count
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, distributed_c10d
from torch.utils.checkpoint import _StopRecomputationError

from tpkernels.comm.transports.processes import Process, machine, process_of
from tpkernels.comm.watch import Watcher, parting, shown
from tpkernels.errors import cause_of
from tpkernels.extension import ExtensionState, extension

# Functions of torch's take the default group for a default argument there. Imported when there is one already
# (the first optimizer does, by way of torch.compile), they hold it to the last; imported earlier, None.
if not dist.is_initialized():
    import torch.distributed.nn.functional

P = ParamSpec("P")
R = TypeVar("R")

REMEMBERED = 64  # calls, which ranks compare
MOST_DESCRIBED = 1024  # kinds of calls
LONGEST_CAUSE = 2000  # characters
_SIGN = 5.0  # seconds between two signs of life of a rank, for those of other machines
_SILENT = 60.0  # seconds without one until a rank is taken for dead: Python may be held up for long
_SIGNS = "tpkernels signs of life of rank "
_FAILURE, _RECENT, _PROCESS = "tpkernels failure", "tpkernels calls of rank ", "tpkernels process of rank "
_NEVER_SENT = 2**31 - 1  # a tag
_SHOWN_WITHIN = 3.0  # seconds, by a rank that waits
_LONGEST_WAIT = 5.0  # seconds at exit, for a collective that other ranks keep in flight


Key = tuple[str, str, tuple[int, ...], torch.dtype | None]  # operator, what moves, of which shape and dtype

_clock = count()  # of calls that begin, in any group


class CannotTakePart(RuntimeError):
    """Raised on all ranks alike when one of them cannot take part in a call; no message is in flight."""


class Kind(NamedTuple):
    """Describes calls that differ in their number only."""

    described: str
    checksum: int


def kind_of(key: Key) -> Kind:
    op, what, shape, dtype = key
    described = f"{op}: {what}" if dtype is None else f"{op}: {what} {tuple(shape)} {dtype}"
    return Kind(described, zlib.crc32(described.encode()))


def is_looked_at(times: int) -> bool:
    """Whether an expensive check is made this time: the first, second, fourth, eighth, ... one."""
    return times & (times - 1) == 0


class GroupCalls:
    """The calls of one group, as this rank knows them: their numbers, kinds and failures."""

    def __init__(self, group: ProcessGroup) -> None:
        self.name, self.rank, self.ranks = str(group.group_name), group.rank(), group.size()
        self.failure = ""  # why nobody may use the group any more
        self.waiting = 0  # the number of the call that this rank is blocked in
        self.waited = 0  # the one that it was blocked in at the last look of the thread that watches
        self.begun_at = -1  # when the last call began in which rows travel, on our clock
        self.begun_by = 0  # which thread
        self._number = 0
        self._noted = 0  # a checksum of all notes
        self._recent: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._group = ref(group)  # its threads end with it
        self.inherited = False  # by a fork, which has none of its threads
        self._matches_tags: dict[str, bool] = {}
        self._peers: dict[int, Process] | None = None  # those of this machine, once known
        self._far: list[int] = []  # ranks of other machines, once known
        self._signed = self._listened = 0.0  # when this rank has last given, and looked for, a sign of life
        self._heard: dict[int, tuple[int, float]] = {}  # signs of each far rank, and since when
        self._seen = 0  # the last number at the last look of the thread that watches
        self.kinds: dict[Key, Kind] = {}  # of the calls that there were
        # how many processors products leave to a collective, by device and segments of TP-invariance
        self.blocks: dict[tuple[torch.device, int], int] = {}
        self._times: dict[str, int] = {}

    def require_usable(self, op: str) -> None:
        """Raise an error if the group was destroyed, has failed, or belongs to another process."""
        if self.failure:
            raise RuntimeError(
                f"{op}: process group '{self.name}' has failed and cannot be used any more: {self.failure}. "
                "Destroy it and make a new one, on all ranks"
            )
        if not self._is_alive():
            raise RuntimeError(f"{op}: process group '{self.name}' was destroyed; make a new one")

    def add_kind(self, key: Key, kind: Kind) -> None:
        """Remember a kind of calls; all ranks add the same kinds, and forget them alike."""
        if len(self.kinds) >= MOST_DESCRIBED:
            self.kinds.clear()
        self.kinds[key] = kind

    def is_due(self, look: str) -> bool:
        """Count a request for an expensive check, and return whether it is to be made."""
        self._times[look] = times = self._times.get(look, 0) + 1
        return is_looked_at(times)

    def note(self, what: str) -> None:
        """Change the tags of later messages, which arrive only if all ranks have made the same note."""
        self._number += 1
        self._recent.append((self._number, what))
        self._noted = zlib.crc32(what.encode(), self._noted)

    def begin(self, op: str, kind: Kind, group: ProcessGroup, *, travels: bool = True) -> Call:
        """Begin the next call. travels: False for a handshake, in which all ranks succeed or none"""
        if self.failure or group not in distributed_c10d._world.pg_map:
            self.require_usable(op)
        self._number = number = self._number + 1
        self._recent.append((number, kind.described))
        if travels:
            self.begun_at, self.begun_by = next(_clock), threading.get_ident()
        # below 2**31 - 1, and hardly shared by calls of another kind or number
        tag = (kind.checksum ^ self._noted ^ number * 0x9E3779B1) % _NEVER_SENT
        return Call(op, group, self, number, tag)

    def matches_tags(self, device: torch.device) -> bool:
        """Whether the backend matches messages by tag; NCCL matches them by order alone."""
        kind = device.type
        if kind not in self._matches_tags:
            self._matches_tags[kind] = self._required_group()._get_backend(device).name() == "gloo"
        return self._matches_tags[kind]

    def fail(self, cause: str) -> None:
        """End the group on all ranks: later calls raise an error that names the first cause."""
        if self.failure:
            return
        cause = f"rank {self.rank}: {cause}"[:LONGEST_CAUSE]
        self.failure = cause
        with suppress(RuntimeError):  # a store may have died with its rank
            if (store := self._store()) is not None:
                self.failure = store.compare_set(_FAILURE, "", cause).decode()
        self._close_connections()
        for backend in self._of_nccl():
            with suppress(RuntimeError, AttributeError):  # ended already, or not torch's own
                backend.abort()

    def first_failure(self) -> str:
        """Return the cause that another rank has passed to `fail`, or an empty text."""
        if not self.failure:
            with suppress(RuntimeError):
                if (store := self._store()) is not None and store.check([_FAILURE]):
                    return store.get(_FAILURE).decode()
        return self.failure

    def compare(self) -> None:
        """Publish this rank's last calls, read those of the other ranks, and fail if they differ."""
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

    def look(self) -> None:
        """Compare if this rank is in the same call as at the last look; the watching thread calls this."""
        blocked = self.waiting and self.waiting == self.waited
        still = self._number and self._number == self._seen and self._of_nccl()
        self.waited, self._seen = self.waiting, self._number
        with suppress(RuntimeError):  # a store may have died with its rank
            if self._peers is None and self._of_nccl():
                self._meet()
            self._give_sign()
            if not still:
                self._heard.clear()
            if still and (cause := self._ended()):
                self.fail(cause)
            elif blocked or still:
                self.compare()

    def introduce(self) -> None:
        """Publish this rank's process and machine, so that the other ranks notice when it ends."""
        if self.ranks > 1 and self._of_nccl() and (store := self._store()) is not None:
            store.set(f"{_PROCESS}{self.rank}", f"{os.getpid()} {machine()}")

    def _meet(self) -> None:
        """Know the processes of other ranks of this machine, once all ranks have introduced themselves."""
        keys = {rank: f"{_PROCESS}{rank}" for rank in range(self.ranks) if rank != self.rank}
        if (store := self._store()) is not None and store.check(list(keys.values())):
            told = {rank: store.get(key).decode().split(" ", 1) for rank, key in keys.items()}
            self._peers = {
                rank: process_of(int(number)) for rank, (number, place) in told.items() if place == machine()
            }
            self._far = [rank for rank in told if rank not in self._peers]

    def _give_sign(self) -> None:
        """Of life, for ranks of other machines."""
        now = time.monotonic()
        if self._far and now - self._signed >= _SIGN and (store := self._store()) is not None:
            self._signed = now
            store.add(f"{_SIGNS}{self.rank}", 1)

    def _ended(self) -> str:
        """Which rank's process has ended, or has given no sign of life for long, if one has."""
        number, described = self._recent[-1]
        for rank, process in (self._peers or {}).items():
            if process.has_ended():
                return f"the process of rank {rank} has ended, before call {number} '{described}' has"
        if (silent := self._silent()) is not None:
            return (
                f"rank {silent} of another machine has given no sign of life for {_SILENT:.0f} s, before "
                f"call {number} '{described}' has ended"
            )
        return ""

    def _silent(self) -> int | None:
        """The first far rank that has given no sign of life while this rank has stood still for long."""
        now = time.monotonic()
        if now - self._listened < _SIGN or (store := self._store()) is None:
            return None
        self._listened = now
        for rank in self._far:
            signs = store.add(f"{_SIGNS}{rank}", 0)
            seen, since = self._heard.get(rank, (-1, now))
            if signs != seen:
                self._heard[rank] = signs, now
            elif now - since >= _SILENT:
                return rank
        return None

    def _of_nccl(self) -> list[Any]:
        """The group's backends for which the host does not wait."""
        group, found = self._group(), []
        if group is not None and self._is_alive():
            for device in group._device_types:
                with suppress(RuntimeError):
                    backend = group._get_backend(device)
                    if backend.name() == "nccl":
                        found.append(backend)
        return found

    def parted(self) -> str:
        """Return which calls differ, once another rank has published its own; an empty text if none does."""
        ends = time.monotonic() + _SHOWN_WITHIN
        with suppress(RuntimeError):  # a store may have died with its rank
            while not self.failure and time.monotonic() < ends:
                self.compare()
                time.sleep(0.02)
        return self.failure

    def _close_connections(self) -> None:
        """Those of gloo, by a wait that runs out at once: nothing else wakes the ranks that wait for us."""
        group, cpu = self._group(), torch.device("cpu")
        if group is None or self.ranks == 1 or not self._is_alive():
            return
        with suppress(RuntimeError):
            if not self.matches_tags(cpu):
                return
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.ranks):
            if peer != self.rank:  # all of them: from a rank that is gone an error comes, and closes nothing
                with suppress(RuntimeError):
                    group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _is_alive(self) -> bool:
        return (group := self._group()) is not None and is_alive(group)

    def end_threads(self) -> None:
        """End the threads of a group that was destroyed but is still referenced."""
        group = self._group()
        if group is not None and not is_alive(group) and not self.inherited:
            torch.ops.tpkernels.end_backends(group.boxed(), _LONGEST_WAIT)

    def _store(self) -> Store | None:
        group = self._group()
        return distributed_c10d._world.pg_map[group][1] if group in distributed_c10d._world.pg_map else None

    def _required_group(self) -> ProcessGroup:
        group = self._group()
        assert group is not None, "a call keeps its group"
        return group


def is_alive(group: ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    return group in distributed_c10d._world.pg_map


# By id, which takes a third of a WeakKeyDictionary's time; see `_added`.
_of_group: dict[int, GroupCalls] = {}


def calls_so_far(group: object) -> GroupCalls | None:
    """Return the calls of a group that has had one, else None."""
    return _of_group.get(id(group))


def calls_of(group: ProcessGroup) -> GroupCalls:
    found = _of_group.get(id(group))
    if found is None:
        found = _added(group)
        if found.ranks > 1:
            found.introduce()
            _watcher.start()
    return found


def ranks_of(group: ProcessGroup) -> int:
    """Return `group.size()`, kept here because the call into C++ is slow."""
    return calls_of(group).ranks


def _added(group: ProcessGroup) -> GroupCalls:
    found = _of_group[id(group)] = GroupCalls(group)
    finalize(group, _of_group.pop, id(group), None)  # another group may get the id
    return found


def _look_at_those_that_wait() -> None:
    for calls in list(_of_group.values()):
        calls.look()


@atexit.register
def _end_threads_of_destroyed_groups() -> None:
    if extension().state is ExtensionState.LOADED:
        for calls in list(_of_group.values()):
            calls.end_threads()


_watcher = Watcher(_look_at_those_that_wait)
atexit.register(_watcher.end)


class Call:
    """A numbered call in a group."""

    __slots__ = ("calls", "group", "number", "op", "tag")

    def __init__(self, op: str, group: ProcessGroup, calls: GroupCalls, number: int, tag: int) -> None:
        """tag: of its messages"""
        self.op, self.group, self.calls, self.number, self.tag = op, group, calls, number, tag

    def wait_for(self, wait: Callable[[], R]) -> R:
        """Run `wait`, which blocks, and return its result; failures of other ranks end it with an error."""
        calls = self.calls
        calls.waiting = self.number
        result = wait()
        calls.waiting = 0  # not after an exception: then the group fails, and nobody looks
        return result


def begin(op: str, what: str, group: ProcessGroup) -> Call:
    """Begin the next call of the group, in which rows move, and return it."""
    return calls_of(group).begin(op, kind_of((op, what, (), None)), group)


def handshake(op: str, what: str, group: ProcessGroup) -> Call:
    """Begin the next call of the group, in which ranks compare arguments: all succeed, or none.

    op: for errors; ranks may be there for different ones
    """
    kind = kind_of(("ranks tell each other", what, (), None))
    return calls_of(group).begin(op, kind, group, travels=False)


def all_or_fail(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function`: if it raises, the groups in which it has begun calls fail."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        began = next(_clock)
        try:
            return function(*args, **options)
        except BaseException as error:
            for calls in list(_of_group.values()):
                if calls.begun_at > began and calls.begun_by == threading.get_ident():
                    calls.fail(f"{type(error).__name__}: {cause_of(error)}")
            raise

    return run


def from_entry(op: Callable[P, R]) -> Callable[P, R]:
    """Wrap an op: its `group` fails if it raises anything but an error of its own checks.

    This rank's next calls would else pair with those of other ranks that have begun theirs: after an
    interrupt that came before the op had begun its calls, or where this rank alone refuses its arguments.
    """
    parameters = signature(op)

    def calls_in(args: tuple[object, ...], options: dict[str, object]) -> GroupCalls | None:
        with suppress(TypeError):  # arguments that the op does not have
            group = parameters.bind(*args, **options).arguments.get("group")
            if isinstance(group, ProcessGroup) and group.size() > 1:
                return calls_of(group)
        return None

    @wraps(op)
    def run(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return op(*args, **options)
        try:
            return op(*args, **options)
        except (ValueError, TypeError, NotImplementedError, CannotTakePart):
            if calls := calls_in(args, options):
                calls.note(f"{op.__name__}: refused")
            raise
        except _StopRecomputationError:  # all is computed that backward asks for
            raise
        except BaseException as error:
            if calls := calls_in(args, options):
                calls.fail(f"{type(error).__name__}: {cause_of(error)}")
            raise

    return run


def _disown_groups_of_parent() -> None:
    """A forked child has none of the threads that move rows."""
    _of_group.clear()
    for group in distributed_c10d._world.pg_map:
        calls = _of_group[id(group)] = GroupCalls(group)
        calls.inherited = True
        calls.failure = (
            f"it was made in process {os.getppid()}, of which this process {os.getpid()} is a fork; make "
            "process groups after the fork"
        )


os.register_at_fork(after_in_child=_disown_groups_of_parent)
