"""Exchanges in memory of the CPU: a thread of each rank copies chunks to the others and raises their flags.

All exchanges of a group share the thread: pushes go out in the order of calls. A push that waits for a slot
holds up those of later calls only. No rank waits for rows of these before it has begun the call that is held
up, and it began that once it had read the call before in the slot.

The hazards of writing after reading, and what excludes each:

- A chunk of epoch e lands in buffer e % 2 while its owner still reads epoch e - 2 there. Whoever writes first
  waits until that owner's `released` word holds e - 2.
- A chunk of epoch e + 1 lands while its owner reads epoch e: another buffer, with flags of its own.
- A flag is seen before its data: it is written after them, by the same thread, and stores become visible in
  order (x86; elsewhere the interpreter's lock, taken between the two, orders them).
- Rows are changed while they are being pushed: the caller waits for `end()`.
- A kernel stores into a slot itself: `before_kernels_push` waits for all `released` words, in this thread.

Whoever waits for a flag or a `released` word looks now and then whether the rank that writes it still has its
end open, and whether its process still runs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Plan, Round, Swap, flag_of, peers_by_step, reusable_after
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange
from tpkernels.comm.transports.memory import Layout, Mailbox, Words
from tpkernels.comm.transports.processes import LOOK_SECONDS, Process

POLL_SECONDS = 50e-6
_COUNTED = 2**31  # calls, after which `released` words start again at 0
_CLOSED = -1  # in a `released` word: its owner makes no more calls


class HostExchange(MailboxExchange):
    """One rank's end of an exchange in CPU memory."""

    host_waits = True

    def __init__(
        self,
        name: str,
        rank: int,
        layout: Layout,
        mailboxes: Sequence[Mailbox],
        timeout: float,
        processes: Mapping[int, Process] | None = None,
        pusher: Pusher | None = None,
    ) -> None:
        """processes: of the other ranks on this machine; virtual ranks have none

        pusher: of the group; virtual ranks have one each
        """
        super().__init__(name, rank, layout, mailboxes, timeout)
        self._processes = dict(processes or {})
        self._closing = threading.Event()
        self._opener = os.getpid()
        self._pusher = pusher or Pusher(f"push of {name}")
        self._pusher.enter()
        # what is dropped without `close` leaves no thread; nothing is under way then: a push holds its end
        self._leave = finalize(self, self._pusher.leave)
        self._leave.atexit = False
        self._last_push: Future[None] | None = None
        self._push_failure: BaseException | None = None

    def late(self) -> int:
        return int(self.status)

    def state(self, words: Words | None) -> list[str]:
        lines = super().state(words)
        if self._last_push is not None and not self._last_push.done():
            lines.append("  this rank's own rows are not all out")
        for peer, _ in peers_by_step(self.ranks, self.rank) if self._mailboxes else ():
            read = int(self.mailbox(peer).released)
            said = "closed its end" if read == _CLOSED else f"read call {read} of these"
            lines.append(f"  rank {peer} has {said}")
        return lines

    def close(self) -> None:
        self._closing.set()
        if os.getpid() == self._opener:  # a fork has its parent's memory, and not its threads
            if self._last_push is not None and not self._pusher.is_current_thread():
                wait([self._last_push])
            if self._mailboxes:
                self.mailbox(self.rank).released.fill_(_CLOSED)
        self._leave()
        self._processes.clear()
        self.let_go()

    def _delivery(self, epoch: int, needs_barrier: bool, plan: Plan, call: Call | None) -> HostDelivery:
        """Needs no barrier: who writes looks at the `released` words. Needs no header: flags have a code."""
        return HostDelivery(self, epoch, plan, flag_of(epoch, 0 if call is None else call.tag), call)

    def released(self, number: int) -> None:
        """Mark a call as read, and tell all ranks."""
        super().released(number)
        self.mailbox(self.rank).released.fill_(self.order.read % _COUNTED)

    def put(self, peer: int, there: slice, rows: Tensor, delivery: HostDelivery) -> None:
        """Write rows of the memory of `peer`, then their flags."""
        landing, chunks = self.landing(delivery.slot, peer), self.chunks_of_ours(there)
        _copy(landing.rows_of(chunks), rows)
        landing.flags[chunks.start : chunks.stop].fill_(delivery.flag)

    def pushing(self, swap: Swap, rows: Tensor, delivery: HostDelivery) -> Future[None]:
        """Push rows in the order of calls; a push that fails ends all later ones of this exchange."""

        def push() -> None:
            if self._push_failure is not None:
                raise self._push_failure
            try:
                self.wait_until_free(swap.to, delivery)
                self.put(swap.to, swap.lands, rows, delivery)
            except BaseException as error:
                self._push_failure = error
                raise

        self._last_push = pushing = self._pusher.submit(push)
        return pushing

    def wait_until_free(self, peer: int, delivery: HostDelivery) -> None:
        """Wait until `peer` has read the previous call in this slot."""
        epoch, released = delivery.number, self.mailbox(peer).released

        def free() -> bool:
            return (int(released) - reusable_after(epoch)) % _COUNTED < _COUNTED // 2

        if cause := self.poll(peer, free, delivery):
            op = "" if delivery.call is None else f"{delivery.op}: "
            raise RuntimeError(
                f"{op}{self.name} on rank {self.rank}: call {epoch} may begin once rank {peer} has read call "
                f"{reusable_after(epoch)}, which has read {int(released)}: {cause}"
            )

    def poll(self, peer: int, there: Callable[[], bool], delivery: HostDelivery) -> str:
        """Wait until `peer` has written; return why it will not, or an empty text once it has."""
        started = time.monotonic()
        next_look, process = started + LOOK_SECONDS, self._processes.get(peer)
        while not there():
            if self._closing.is_set():
                return "it was closed"
            now = time.monotonic()
            if now > started + self.timeout:
                return f"the host waited {self.timeout:g} s"
            if now > next_look:
                next_look = now + LOOK_SECONDS
                ended = process is not None and process.has_ended()
                closed = int(self.mailbox(peer).released) == _CLOSED
                if (ended or closed) and not there():  # what it wrote before counts
                    return "its process has ended" if ended else "it has destroyed its process group"
                if (call := delivery.call) is not None:
                    if cause := call.calls.first_failure():
                        return cause
                    call.calls.compare(call)
            time.sleep(POLL_SECONDS)
        return ""


class HostDelivery(MailboxDelivery):
    """A call in flight in CPU memory."""

    exchange: HostExchange

    def __init__(self, exchange: HostExchange, number: int, plan: Plan, flag: int, call: Call | None) -> None:
        super().__init__(exchange, number, plan, call)
        self.flag = flag
        self.awaited.fill_(flag)  # of the slot, whose last call has been read
        self._pushing: list[Future[None]] = []

    def keep(self, rows: Tensor) -> None:
        self.exchange.put(self.exchange.rank, self.plan.kept, rows, self)

    def move(self, round: Round, outgoing: Tensor, first_row: int) -> None:
        for swap in round.swaps:
            rows = outgoing
            if swap.sent.stop - swap.sent.start != outgoing.shape[0]:
                rows = outgoing[swap.sent.start - first_row : swap.sent.stop - first_row]
            self._pushing.append(self.exchange.pushing(swap, rows, self))

    def before_kernels_push(self) -> None:
        for peer, _ in peers_by_step(self.exchange.ranks, self.exchange.rank):
            self.exchange.wait_until_free(peer, self)

    def end(self) -> None:
        self.exchange.released(self.number)
        for pushing in self._pushing:
            pushing.result()
        self._pushing.clear()

    def problem(self) -> BaseException | None:
        failed = (pushing.exception() for pushing in self._pushing if pushing.done())
        return next((error for error in failed if error is not None), None)

    def missing(self, chunk: int) -> str:
        flag = self.flags[chunk]
        return self.exchange.poll(chunk // self.exchange.splits, lambda: int(flag) == self.flag, self)


def _copy(into: Tensor, rows: Tensor) -> None:
    """In this thread alone: to torch's `copy_` each thread that pushes brings a pool of its own, beside those
    that multiply.
    """
    if rows.is_contiguous() and rows.dtype == into.dtype and not rows.is_neg():
        ctypes.memmove(into.data_ptr(), rows.data_ptr(), rows.nbytes)
    else:
        into.copy_(rows)


class Pusher:
    """Calls functions one after the other, in a thread that keeps no process alive.

    The thread runs while an exchange uses the pusher.
    """

    def __init__(self, name: str) -> None:
        self._name, self._users = name, 0
        self._lock = threading.RLock()  # `leave` may run wherever objects are freed
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._thread: threading.Thread

    def enter(self) -> None:
        """Start the thread for the first user."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._calls = SimpleQueue()
                self._thread = threading.Thread(
                    target=_serve, args=(self._calls,), name=self._name, daemon=True
                )
                self._thread.start()

    def leave(self) -> None:
        """End the thread after the last user, once what was submitted has ended; any thread may call this."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            thread = self._thread
            self._calls.put(None)
        if threading.current_thread() is not thread:
            thread.join()

    def submit(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put((function, future))
        return future

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread


@torch.no_grad()  # what is pushed may require gradients
def _serve(calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    while (call := calls.get()) is not None:
        function, future = call
        try:
            function()
        except BaseException as error:  # whoever waits for it gets it
            future.set_exception(error)
        else:
            future.set_result(None)
        del call, function, future  # they hold tensors


# By group and process: a fork has none of its parent's threads.
_of_group: WeakValueDictionary[tuple[int, int], Pusher] = WeakValueDictionary()


def pusher_of(group: ProcessGroup) -> Pusher:
    """Return the pusher that all exchanges of a group share."""
    key = id(group), os.getpid()
    found = _of_group.get(key)
    if found is None:
        found = _of_group[key] = Pusher(f"push of process group '{group.group_name}'")
    return found
