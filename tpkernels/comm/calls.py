"""The calls of a process group: all ranks make the same calls in the same order, or all ranks raise.

A call has a number and a kind, such as "row_linear: shards of the sum (64, 128) float32". Over gloo it begins
with a message to every peer: a header that says both, and few rows right behind it. Receives for the messages
of coming calls are posted ahead, so that a message never waits for its receiver (the eager protocol of MPI).
Before a rank uses what it received, it compares headers: ranks in different calls all raise, at once, and no
data is mixed. Two calls of one kind, of which one rank skips one, look alike until another kind comes.

Ranks that share memory send no headers for calls that move rows there: flags have a code of their call. Each
writes the headers of all its calls into a page that the others read when they have waited long. So do ranks
of NCCL on one machine, for errors and dumps.

What sends nothing and must be alike all the same is noted: an op that this rank refused, or the ids it was
given. Headers hold a checksum of all notes.

    with calls:                         what an op raises while a call is under way fails the group
        call = calls.begin(op, kind)

After an exception in the middle of a call no rank can know which messages are on their way. The group has
failed then: the first cause is put into its store, and its connections are closed, so that no rank waits in
vain. Every later call raises an error on all ranks, which names the first cause.

NCCL has no tags, and the host never waits for it: ranks compare a kind when it is new. A thread looks for the
first cause of other ranks, and aborts the communicator. That a peer has died is for torch's watchdog to say.
"""

from __future__ import annotations

import atexit
import logging
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from ctypes import memset
from datetime import timedelta
from mmap import mmap
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work, distributed_c10d
from torch.utils.checkpoint import _StopRecomputationError

from tpkernels.comm.transports.memory import SharedMemory
from tpkernels.errors import cause_of
from tpkernels.extension import ExtensionState, extension
from tpkernels.reserved_sms import Reservation

# Functions of torch's take the default group for a default argument there. Imported when there is one already
# (the first optimizer does, by way of torch.compile), they hold it to the last; imported earlier, None.
if not dist.is_initialized():
    import torch.distributed.nn.functional

MOST_KINDS = 1024
LONGEST_CAUSE = 2000  # characters
HEADER_BYTES = 192
EAGER_BYTES = 64 * 1024  # that travel with a header at most; fewer where many ranks post receives for them
AHEAD = 2  # calls whose receives are posted: a gather and a sum are in flight at once in a backward
INTERVAL = 1.0  # seconds between two looks for the first cause of other ranks
_NUMBERS = struct.Struct("<QII")  # in a header, before its text: of the call, and checksums of notes and text
_MESSAGE, _NEVER_SENT = 2**31 - 3, 2**31 - 1  # tags that chunks do not have
_FAILURE = "tpkernels failure"
_WATCHDOG = "exception_dump"  # torch's, in the store of the world: its watchdog ends all ranks in a minute
_LONGEST_WAIT = 5.0  # seconds at exit, for a collective that other ranks keep in flight
_LATEST = 64  # calls of a rank whose headers are in its page, behind the number of the last one
PAGE_BYTES = (1 + _LATEST) * HEADER_BYTES

Key = tuple[Any, ...]
Receive = tuple[int, Tensor, Work]  # from which peer, into what

on_failure: list[Callable[[str], object]] = []  # called with the cause, before a group ends


class CannotTakePart(RuntimeError):
    """Raised on all ranks alike when one of them cannot take part in a call; no message is in flight."""


def saying_all(text: str) -> RuntimeError:
    """Return an error of ranks that part ways; how it came to a user's call says nothing more."""
    error = RuntimeError(text)
    error.says_all = True  # type: ignore[attr-defined]
    return error


_REFUSALS = ValueError, TypeError, NotImplementedError, CannotTakePart  # of an op that has sent nothing yet


class Kind:
    """What calls have alike that differ in their number only. transport: how their rows move"""

    __slots__ = ("buffer", "checksum", "described", "header", "transport")

    def __init__(self, described: str, transport: Any = None) -> None:
        text = described.encode()
        self.described, self.checksum, self.transport = described, zlib.crc32(text), transport
        self.buffer = bytearray((bytes(_NUMBERS.size) + text)[:HEADER_BYTES].ljust(HEADER_BYTES))
        self.header = torch.frombuffer(self.buffer, dtype=torch.uint8)


def eager_bytes(ranks: int) -> int:
    """How many bytes of rows fit into the message that announces a call in a group."""
    return min(EAGER_BYTES, max(1024, 1024**2 // ranks))


class Calls:
    """The calls of one group, as this rank makes them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.name, self.rank, self.ranks = str(group.group_name), group.rank(), group.size()
        self.peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        # rows up to this size travel in the message that announces a call
        self.eager_bytes = eager_bytes(self.ranks)
        self.failure = ""  # why nobody may use the group any more
        self.inherited = False  # by a fork, which has none of its threads
        self.kinds: dict[Key, Kind] = {}
        self.splits: dict[Key, Any] = {}  # the `TensorParallel` of each way to split an op
        # what collectives reserve, by device and segments of TP-invariance
        self.reservations: dict[tuple[torch.device, int], Reservation] = {}
        self.moved = 0  # calls in which rows travel
        self.latest: deque[tuple[int, str]] = deque(maxlen=_LATEST)  # number and description, for a dump
        # calls over gloo that have not ended, by number: what is received from which peer
        self.in_flight: dict[int, list[Receive]] = {}
        self.memory: Collection[SharedMemory] = ()
        self.pages: dict[int, mmap] = {}  # of the ranks of this machine, once they share memory
        self._number = self._noted = 0
        self._last_note = ""
        self._entered: list[int] = []
        self._group = ref(group)  # its threads end with it
        self._has_tags: dict[str, bool] = {}
        self.posted: deque[list[Receive]] = deque()  # where a peer's next message lands
        self._times: dict[str, int] = {}

    def __enter__(self) -> None:
        try:
            self._entered.append(self.moved)
        except BaseException as error:  # Ctrl-C
            if self.ranks > 1:
                self.fail(f"{type(error).__name__}: {cause_of(error)}")
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        before = self._entered.pop()
        if error is None or self.ranks == 1 or isinstance(error, _StopRecomputationError):
            return
        if self.moved == before and isinstance(error, _REFUSALS):
            self.note(f"{str(error).partition(':')[0]}: refused")
            return
        cause = f"{type(error).__name__}: {cause_of(error)}"
        # of a device, such as of torch's barrier after its time-out, which names a rank on the terminal alone
        if isinstance(error, torch.AcceleratorError) and (behind := self.behind()):
            cause += f"; {behind}"
            getattr(error, "add_note", str)(behind)  # Python 3.10 has no notes
        self.fail(cause)
        if getattr(error, "says_all", False):
            raise error.with_traceback(None) from None

    def require_usable(self, op: str) -> None:
        """Raise an error if the group was destroyed, has failed, or belongs to another process."""
        if self.failure:
            raise RuntimeError(
                f"{op}: process group '{self.name}' has failed and cannot be used any more: {self.failure}. "
                "Destroy it and make a new one, on all ranks"
            )
        if not self.group_is_alive():
            raise RuntimeError(f"{op}: process group '{self.name}' was destroyed; make a new one")

    def add_kind(self, key: Key, kind: Kind) -> Kind:
        """Remember a kind of calls; all ranks add the same kinds, and forget them alike."""
        if len(self.kinds) >= MOST_KINDS:
            self.kinds.clear()
        self.kinds[key] = kind
        return kind

    def is_due(self, look: str) -> bool:
        """Count a request for an expensive check; it is made the first, second, fourth, eighth, ... time."""
        self._times[look] = times = self._times.get(look, 0) + 1
        return times & (times - 1) == 0

    def note(self, what: str) -> None:
        """Change the headers of later calls, which are right only if all ranks have made the same note."""
        self._last_note = what
        self._noted = zlib.crc32(what.encode(), self._noted)

    def begin(self, op: str, kind: Kind, group: ProcessGroup | None, *, moves: bool = True) -> Call:
        """Begin the next call. moves: False for a handshake, in which all ranks succeed or none"""
        if self.failure or group is None or group not in distributed_c10d._world.pg_map:
            self.require_usable(op)
        assert group is not None, "it was not destroyed"
        self._number = number = self._number + 1
        self.moved += moves
        self.latest.append((number, kind.described))
        _NUMBERS.pack_into(kind.buffer, 0, number, self._noted, kind.checksum)
        if self.pages:
            self.write_header(kind, number)
        # below the tags of messages, and hardly shared by calls of another kind or number
        tag = (kind.checksum ^ self._noted ^ number * 0x9E3779B1) % _MESSAGE
        return Call(op, group, self, kind, number, tag)

    def write_header(self, kind: Kind, number: int) -> None:
        """Let ranks of this machine read the header of the call that has begun."""
        page = self.pages[self.rank]
        page[place_of(number)] = kind.buffer
        page[:8] = kind.buffer[:8]  # now the header is there

    def has_tags(self, device: torch.device) -> bool:
        """Whether the backend matches messages by tag; NCCL matches them by order alone."""
        kind = device.type
        found = self._has_tags.get(kind)
        if found is None:
            group = self._group()
            assert group is not None, "a call keeps its group"
            backend = group._get_backend(device)  # an error if the group moves nothing of this device
            found = self._has_tags[kind] = kind == "cpu" and backend.name() == "gloo"
        return found

    def post_receives(self, group: ProcessGroup, count: int) -> None:
        """Have the receives of `count` coming calls posted; a peer's messages come in the order of calls."""
        # a profiler would be told of their end when it has freed what it would note that in
        is_profiled = torch.autograd._profiler_enabled()
        if is_profiled:
            torch.autograd._enable_record_function(False)
        try:
            while len(self.posted) < count:
                posted = []
                for peer in self.peers:
                    message = torch.empty(HEADER_BYTES + self.eager_bytes, dtype=torch.uint8, device="cpu")
                    memset(message.data_ptr(), 0, 8)  # a dump sees by the number whether its header is there
                    posted.append((peer, message, group.recv([message], peer, _MESSAGE)))
                self.posted.append(posted)
        finally:
            if is_profiled:
                torch.autograd._enable_record_function(True)

    def compare(self, call: Call) -> None:
        """Raise if another rank of this machine has made another call than this one.

        For waits that have taken long, in memory that ranks share.
        """
        place = place_of(call.number)
        for peer, page in self.pages.items():
            if int.from_bytes(page[:8], "little") >= call.number:  # looked at first: its header is there then
                ours, theirs = self.pages[self.rank][place], page[place]
                if theirs != ours:
                    raise self.differing(ours, theirs, peer)

    def behind(self) -> str:
        """Return which ranks of this machine have not begun this rank's last call, and where they are.

        Where they write no pages, and where all have begun it, an empty text.
        """
        last = {peer: int.from_bytes(page[:8], "little") for peer, page in self.pages.items()}
        found = [
            f"rank {peer} is at call {number} '{read_header(self.pages[peer][place_of(number)])[1]}'"
            for peer, number in last.items()
            if number < self._number
        ]
        return f"{'; '.join(found)}, this rank at call {self._number}" if found else ""

    def fail(self, cause: str) -> None:
        """End the group on all ranks: later calls raise an error that names the first cause."""
        if self.failure:
            return
        for told in on_failure:
            told(cause)
        self.failure = cause = f"rank {self.rank}: {cause}"[:LONGEST_CAUSE]
        with suppress(RuntimeError):  # a store may have died with its rank
            if (store := self._store()) is not None:
                self.failure = store.compare_set(_FAILURE, "", cause).decode()
        self._close_connections()
        for backend in self.nccl_backends():
            with suppress(RuntimeError, AttributeError):  # ended already, or not torch's own
                backend.abort()

    def first_failure(self) -> str:
        """Return the cause that another rank has passed to `fail`, or an empty text."""
        if not self.failure:
            with suppress(RuntimeError):
                if (store := self._store()) is not None and store.check([_FAILURE]):
                    return store.get(_FAILURE).decode()
        return self.failure

    def is_ended_by_watchdog(self) -> bool:
        """Whether torch's watchdog of NCCL has found a time-out or an error, on any rank."""
        store = self._store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store is not None and store.check([_WATCHDOG])

    def end_threads(self) -> None:
        """End the threads of a group that was destroyed but is still referenced.

        gloo's take Python's lock to free a finished collective's tensors, and a thread that asks for the lock
        while the interpreter ends aborts the process.
        """
        group = self._group()
        if group is not None and not is_alive(group) and not self.inherited:
            torch.ops.tpkernels.end_backends(group.boxed(), _LONGEST_WAIT)

    def differing(self, ours: bytes, theirs: bytes, peer: int) -> RuntimeError:
        """Return the error of two headers that differ."""
        (number, noted, _), text = read_header(ours)
        (other_number, other_noted, _), other_text = read_header(theirs)
        said = f"call {number} is '{text}' on rank {self.rank}, '{other_text}' on rank {peer}"
        if text == other_text:
            said = f"'{text}' is call {number} on rank {self.rank}, {other_number} on rank {peer}"
            if number == other_number and noted != other_noted:
                said = (
                    f"before call {number}, '{text}', ranks {self.rank} and {peer} were given other data, or "
                    f"one of them refused an op; the last that this rank noted is '{self._last_note}'"
                )
        return saying_all(
            f"ranks have left the common order of calls: {said}; every rank must make the same calls, with "
            "equal requires_grad, shapes, options and ids (TPKERNELS_DEBUG=1 compares them before each)"
        )

    def nccl_backends(self) -> list[Any]:
        """The group's backends for which the host does not wait."""
        group, found = self._group(), []
        if group is not None and self.group_is_alive():
            for device in group._device_types:
                with suppress(RuntimeError):
                    backend = group._get_backend(device)
                    if backend.name() == "nccl":
                        found.append(backend)
        return found

    def _close_connections(self) -> None:
        """Those of gloo, by a wait that runs out at once: nothing else wakes the ranks that wait for us."""
        group = self._group()
        if group is None or self.ranks == 1 or not self.group_is_alive():
            return
        with suppress(RuntimeError):
            if not self.has_tags(torch.device("cpu")):
                return
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in self.peers:  # all of them: from a rank that is gone an error comes, and closes nothing
            with suppress(RuntimeError):
                group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def group_is_alive(self) -> bool:
        return (group := self._group()) is not None and is_alive(group)

    def _store(self) -> Store | None:
        group = self._group()
        return distributed_c10d._world.pg_map[group][1] if group in distributed_c10d._world.pg_map else None


class Call:
    """A numbered call in a group."""

    __slots__ = ("_header", "_received", "_sends", "calls", "group", "kind", "number", "op", "tag")

    def __init__(self, op: str, group: ProcessGroup, calls: Calls, kind: Kind, number: int, tag: int) -> None:
        """tag: of its chunks"""
        self.op, self.group, self.calls, self.kind = op, group, calls, kind
        self.number, self.tag = number, tag
        self._sends: list[tuple[Work, int, Tensor]] = []  # a tensor must live until it is sent

    def announce(self, rows: Tensor | None = None, by_peer: list[Tensor] | None = None) -> None:
        """Send the header to all peers, with few rows: the same for each, or of each rank, contiguous."""
        calls, group, kind = self.calls, self.group, self.kind
        if rows is not None:
            message = torch.cat((kind.header, rows.view(torch.uint8).view(-1)))
        else:
            message = kind.header.clone()
        self._header = message
        peer: int | str = " or ".join(map(str, calls.peers))
        try:
            if not calls.posted:
                calls.post_receives(group, 1)
            self._received = calls.posted.popleft()
            calls.in_flight[self.number] = [*self._received]
            for peer in calls.peers:
                if by_peer is not None:
                    message = torch.cat((kind.header, by_peer[peer].view(torch.uint8).view(-1)))
                self._sends.append((group.send([message], peer, _MESSAGE), peer, message))
        except RuntimeError as error:
            raise self.blaming(peer, "rank {} cannot be reached", error) from error

    def send(self, rows: Tensor, peer: int) -> None:
        """Send a chunk."""
        try:
            self._sends.append((self.group.send([rows], peer, self.tag), peer, rows))
        except RuntimeError as error:
            raise self.blaming(peer, "rank {} cannot be reached", error) from error

    def receive(self, rows: Tensor, peer: int) -> Callable[[], object]:
        """Have a chunk received; returns the function that blocks until it is there."""
        try:
            receiving = self.group.recv([rows], peer, self.tag)
            self.calls.in_flight[self.number].append((peer, rows, receiving))
        except RuntimeError as error:
            raise self.blaming(peer, "rank {} cannot be reached", error) from error

        def wait() -> None:
            try:
                receiving.wait()
            except RuntimeError as error:
                raise self.blaming(peer, "rows of rank {} did not arrive", error) from error

        return wait

    def confirm(self) -> list[Tensor]:
        """Wait until all peers have begun a call; raise if it is another.

        returns: what lies behind their headers
        """
        ours, rows = self._header[:HEADER_BYTES], []
        for peer, message, receiving in self._received:
            try:
                receiving.wait()
            except RuntimeError as error:
                raise self.blaming(peer, "rows of rank {} did not arrive", error) from error
            if not torch.equal(message[:HEADER_BYTES], ours):
                theirs = bytes(message[:HEADER_BYTES].tolist())
                raise self.calls.differing(bytes(ours.tolist()), theirs, peer)
            rows.append(message[HEADER_BYTES:])
        return rows

    def end(self) -> None:
        """Wait until all is sent, so that its memory may change."""
        calls = self.calls
        for sending, peer, _ in self._sends:
            try:
                sending.wait()
            except RuntimeError as error:
                raise self.blaming(peer, "rank {} did not take its rows", error) from error
        self._sends.clear()
        calls.in_flight.pop(self.number, None)
        if not calls.in_flight:  # while a call waits, posting would take its time
            with suppress(RuntimeError):  # a peer has left after its last call: a next one would raise
                calls.post_receives(self.group, AHEAD)

    def blaming(self, peer: int | str, what: str, error: RuntimeError) -> RuntimeError:
        """Return an error that names the rank at fault. what: with a place for its number"""
        calls = self.calls
        cause = calls.first_failure() or error
        return blaming(
            self.op, what.format(peer), f"process group '{calls.name}'", calls.rank, calls.ranks, cause
        )


def blaming(op: str, what: str, where: str, rank: int, ranks: int, cause: object) -> RuntimeError:
    """Return an error that names the rank whose rows did not come."""
    return saying_all(
        f"{op}: {what}: it died, came too late, or left the common order of calls. Ranks are numbered within "
        f"{where}, where this is {rank} of {ranks}. Cause: {cause_of(cause)}"
    )


def read_header(header: bytes) -> tuple[tuple[int, ...], str]:
    return _NUMBERS.unpack_from(header), header[_NUMBERS.size :].decode(errors="replace").strip()


def place_of(number: int) -> slice:
    """Return where the header of a call lies in a page."""
    start = (1 + number % _LATEST) * HEADER_BYTES
    return slice(start, start + HEADER_BYTES)


def is_alive(group: ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    return group in distributed_c10d._world.pg_map


# By id, which takes a third of a WeakKeyDictionary's time.
CALLS_OF: dict[int, Calls] = {}


def calls_so_far(group: object) -> Calls | None:
    """Return the calls of a group that has had one, else None."""
    return CALLS_OF.get(id(group))


def calls_of(group: ProcessGroup) -> Calls:
    """Return the calls of a group; all that use it share them."""
    found = CALLS_OF.get(id(group))
    if found is None:
        found = Calls(group)
        finalize(group, _forget, id(group))  # another group may get the id; before it is known, as of Ctrl-C
        CALLS_OF[id(group)] = found
        if found.ranks > 1 and found.nccl_backends():
            _watch.start()
    return found


def _forget(number: int) -> None:
    """Let go of what is posted before the group's connections end, and not when garbage is collected."""
    if (calls := CALLS_OF.pop(number, None)) is not None:
        calls.posted.clear()
        calls.in_flight.clear()
        calls.kinds.clear()
        calls.splits.clear()


def left_before_a_call(group: object, error: BaseException) -> None:
    """Fail a group whose op was interrupted before it could enter `Calls`; an error of arguments is none."""
    refused = isinstance(error, (*_REFUSALS, RuntimeError))
    if not refused and isinstance(group, ProcessGroup) and is_alive(group) and group.size() > 1:
        calls_of(group).fail(f"{type(error).__name__}: {cause_of(error)}")


def begin(op: str, what: str, group: ProcessGroup) -> Call:
    """Begin the next call of the group, in which rows move, and return it."""
    calls = calls_of(group)
    return calls.begin(op, kind_of(calls, (op, what), f"{op}: {what}"), group)


def handshake(op: str, what: str, group: ProcessGroup) -> Call:
    """Begin the next call of the group, in which ranks compare arguments: all succeed, or none.

    op: for errors; ranks may be there for different ones
    """
    calls = calls_of(group)
    kind = kind_of(calls, ("ranks tell each other", what), f"ranks tell each other: {what}")
    return calls.begin(op, kind, group, moves=False)


def kind_of(calls: Calls, key: Key, described: str) -> Kind:
    """Return the kind that was added by this key, or add it."""
    return calls.kinds.get(key) or calls.add_kind(key, Kind(described))


class _Watch:
    """Looks about once a second for ranks of NCCL that have failed, and for replays that have missed rows.

    Its thread keeps no process alive.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs in this process already."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="tpkernels watch", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(INTERVAL):
            for calls in list(CALLS_OF.values()):
                with suppress(RuntimeError):  # a store may have died with its rank
                    if not calls.failure and calls.nccl_backends():
                        if missed := next(filter(None, (each.missed() for each in list(calls.memory))), ""):
                            logging.getLogger("tpkernels.comm").error("%s", missed)  # no call may come
                        if cause := missed or calls.first_failure():
                            calls.fail(cause)  # else other ranks wait for us in a kernel
                        elif on_failure and calls.is_ended_by_watchdog():
                            for told in on_failure:
                                told("torch's watchdog of NCCL has found a time-out or an error on a rank")

    def end(self) -> None:
        """End the thread, before the interpreter ends: a thread in torch's store would abort the process."""
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(5.0)


_watch = _Watch()


@atexit.register
def _end_threads() -> None:
    _watch.end()
    if extension().state is ExtensionState.LOADED:
        for calls in list(CALLS_OF.values()):
            calls.end_threads()


def _disown_groups_of_parent() -> None:
    """A forked child has none of the threads that move rows."""
    CALLS_OF.clear()
    for group in distributed_c10d._world.pg_map:
        calls = CALLS_OF[id(group)] = Calls(group)
        calls.inherited = True
        calls.failure = (
            f"it was made in process {os.getppid()}, of which this process {os.getpid()} is a fork; make "
            "process groups after the fork"
        )


os.register_at_fork(after_in_child=_disown_groups_of_parent)
