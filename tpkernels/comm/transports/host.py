"""Exchanges in memory of the CPU: a thread of each rank copies chunks to the others and raises their flags.

The hazards of writing after reading, and what excludes each:

- A chunk of epoch e lands in buffer e % 2 while its owner still reads epoch e - 2 there. Whoever writes first
  waits until that owner's `released` word holds e - 2.
- A chunk of epoch e + 1 lands while its owner reads epoch e: another buffer, with flags of its own.
- A flag is seen before its data: it is written after them, by the same thread, and stores become visible in
  order (x86; elsewhere the interpreter's lock, taken between the two, orders them).
- Rows are changed while they are being pushed: the caller waits for `wait()`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Plan, Swap, flag_of, is_other_call, reusable_after
from tpkernels.comm.transports.mailbox import Layout, Mailbox, MailboxDelivery, MailboxExchange, code_of

T = TypeVar("T")

POLL_SECONDS = 50e-6


class HostExchange(MailboxExchange):
    """One rank's end in CPU memory."""

    host_waits = True

    def __init__(
        self, name: str, rank: int, layout: Layout, mailboxes: Sequence[Mailbox | None], timeout: float
    ) -> None:
        super().__init__(name, rank, layout, mailboxes, timeout)
        self._closing = threading.Event()
        self._pusher = _Pusher(f"push of {name}")

    def late(self) -> int:
        return int(self.status)

    def close(self) -> None:
        self._closing.set()
        self._pusher.close()
        self._mailboxes = ()

    def _delivery(self, epoch: int, plan: Plan, call: Call | None) -> HostDelivery:
        return HostDelivery(self, epoch, plan, flag_of(epoch, code_of(call)), call)

    def released(self, number: int) -> None:
        """And tell all ranks."""
        super().released(number)
        self.mailbox(self.rank).released.fill_(self.read())

    def pushing(self, swap: Swap, rows: Tensor, delivery: HostDelivery) -> Future[None]:
        """In order of calls; a push that fails ends those behind it, too."""

        def push() -> None:
            self._wait_until_free(swap.to, delivery)
            self.put(swap.to, swap.lands, rows, delivery.number, delivery.awaited)

        return self._pusher.submit(push)

    def _wait_until_free(self, peer: int, delivery: HostDelivery) -> None:
        deadline, epoch = time.monotonic() + self.timeout, delivery.number
        released = self.mailbox(peer).released
        while int(released) < reusable_after(epoch):
            if self._closing.is_set():
                raise RuntimeError(f"{self.name} on rank {self.rank} was closed during call {epoch}")
            if delivery.failure:
                raise RuntimeError(delivery.failure)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} on rank {self.rank}: call {epoch} waited {self.timeout:g} s for rank "
                    f"{peer} to read call {reusable_after(epoch)}, has read {int(released)}: is it alive?"
                )
            time.sleep(POLL_SECONDS)


class HostDelivery(MailboxDelivery):
    """One call in CPU memory."""

    exchange: HostExchange

    def __init__(self, exchange: HostExchange, number: int, plan: Plan, flag: int, call: Call | None) -> None:
        super().__init__(exchange, number, plan, torch.tensor([flag], dtype=torch.int32), call)
        self.flag = flag
        self._pushing: list[Future[None]] = []
        self._received: dict[int, tuple[Work, slice]] = {}  # by their first chunk, until flags are up

    def swap(self, swap: Swap, outgoing: Tensor) -> None:
        if swap.to in self.exchange.same_machine:
            self._pushing.append(self.exchange.pushing(swap, outgoing, self))
        if (received := self.swap_inter_node(swap, outgoing)) is not None:
            self._received[self.exchange.chunk_numbers(swap.received).start] = received, swap.received

    @property
    def failure(self) -> str:
        """Why the group has failed, if it has."""
        return self.call.calls.failure if self.call is not None else ""

    def wait(self) -> None:
        for pushing in self._pushing:
            self._watched(pushing.result)
        self._pushing.clear()
        if self.inter_node is not None:
            self.inter_node.await_sends()

    def release(self) -> None:
        self.exchange.released(self.number)

    def problem(self) -> BaseException | None:
        failed = (pushing.exception() for pushing in self._pushing if pushing.done())
        return next((error for error in failed if error is not None), None)

    def before_kernels_wait(self) -> None:
        """For chunks from other machines: no kernel can wait for them, as `missing` raises their flags."""
        for chunk in list(self._received):
            self.await_chunk(chunk)

    def missing(self, chunk: int) -> str:
        if received := self._received.pop(chunk, None):
            work, rows = received
            try:
                work.wait()
            except RuntimeError as error:
                return str(error)
            self.exchange.raise_flags(self.flags, rows, self.awaited)
        if int(self.flags[chunk]) == self.flag:
            return ""
        return self._watched(lambda: self._poll(chunk))

    def _poll(self, chunk: int) -> str:
        """Why a flag is not raised in time; nothing once it is."""
        deadline = time.monotonic() + self.exchange.timeout
        while (seen := int(self.flags[chunk])) != self.flag:
            if is_other_call(seen, self.flag):
                return "it sent rows of another call"
            if self.failure:
                return self.failure
            if time.monotonic() > deadline:
                return f"the host waited {self.exchange.timeout:g} s"
            time.sleep(POLL_SECONDS)
        return ""

    def _watched(self, wait: Callable[[], T]) -> T:
        return wait() if self.call is None else self.call.wait_for(wait)


class _Pusher:
    """Calls functions one after the other, in a thread that keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put((function, future))
        return future

    def close(self) -> None:
        """Once what is under way has ended. A caller may be anybody: objects are finalized in any thread."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()  # what is pushed may require gradients
    def _serve(self) -> None:
        failure: BaseException | None = None
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                if failure is None:
                    function()
            except BaseException as error:  # whoever waits for it gets it
                failure = error
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
            del call, function, future  # they hold tensors
