"""Exchanges in memory of the CPU: a thread of each rank copies chunks to the others and raises their flags.

The hazards of writing after reading, and what excludes each:

- A piece of epoch e lands in buffer e % 2 while its owner still reads epoch e - 2 there. Whoever writes first
  waits until that owner's `released` word holds e - 2.
- A piece of epoch e + 1 lands while its owner reads epoch e: another buffer. The flags are shared by the two
  buffers, and then hold e + 1 where e is waited for: they are compared with >=, and epoch e is all there,
  because each rank pushes in order of epochs.
- A flag is seen before its data: it is written after them, by the same thread, and stores become visible in
  order (x86; elsewhere the interpreter's lock, taken between the two, orders them).
- The own piece is changed while it is being pushed: the caller waits for `wait()`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tpkernels.comm.schedule import reusable_after, slot_of
from tpkernels.comm.transport import Delivery, Exchange, Mailbox

POLL_SECONDS = 50e-6


class HostExchange(Exchange):
    """One rank's end in CPU memory."""

    def __init__(
        self,
        name: str,
        rank: int,
        mailboxes: Sequence[Mailbox | None],
        splits: int,
        timeout: float,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(name, rank, mailboxes, splits, timeout, group)
        self._closing = threading.Event()
        self._pusher = _Pusher(f"push of {name}")

    def read(self) -> int:
        return int(self._mailbox(self.rank).released)

    def late(self) -> int:
        return int(self.status)

    def close(self) -> None:
        self._closing.set()
        self._pusher.close()
        self._mailboxes = ()

    def _delivery(self, epoch: int, own: Mailbox) -> HostDelivery:
        return HostDelivery(self, epoch, own, torch.tensor([epoch], dtype=torch.int32))

    def released(self, epoch: int) -> None:
        """Tell all ranks that ours has read call number `epoch`, and the calls before."""
        self._mailbox(self.rank).released.fill_(epoch)

    def pushing(self, peer: int, part: int, rows: Tensor, epoch: int) -> Future[None]:
        """In order of calls; a push that fails ends those behind it, too."""
        return self._pusher.submit(lambda: self._push(peer, part, rows, epoch))

    def _push(self, peer: int, part: int, rows: Tensor, epoch: int) -> None:
        self._wait_until_free(peer, epoch)
        self.put(peer, part, rows, epoch)

    def put(self, peer: int, part: int, rows: Tensor, epoch: int) -> None:
        """Write the rows before their flag."""
        mailbox = self._mailbox(peer)
        mailbox.buffers[slot_of(epoch), self.rank, self.part_rows(part)].copy_(rows)
        mailbox.flags[self.rank * self.splits + part] = epoch

    def _wait_until_free(self, peer: int, epoch: int) -> None:
        deadline = time.monotonic() + self.timeout
        released = self._mailbox(peer).released
        while int(released) < reusable_after(epoch):
            if self._closing.is_set():
                raise RuntimeError(f"{self.name} on rank {self.rank} was closed during call {epoch}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} on rank {self.rank}: call {epoch} waited {self.timeout:g} s for rank "
                    f"{peer} to read call {reusable_after(epoch)}, has read {int(released)}: is it alive?"
                )
            time.sleep(POLL_SECONDS)


class HostDelivery(Delivery):
    """One call in CPU memory."""

    exchange: HostExchange

    def __init__(self, exchange: HostExchange, number: int, own: Mailbox, epoch: Tensor) -> None:
        super().__init__(exchange, number, own, epoch)
        self._pushing: list[Future[None]] = []
        self._received: dict[int, Work] = {}  # by chunk, until its flag is up

    def push(self, peer: int, part: int, rows: Tensor) -> None:
        exchange = self.exchange
        if peer == exchange.rank:
            exchange.put(peer, part, rows, self.number)
            return
        if peer in exchange.near:
            self._pushing.append(exchange.pushing(peer, part, rows, self.number))
        if self._far is not None:
            source, received = self._far.swap(peer, exchange.part_rows(part), rows)
            if received is not None:
                self._received[source * exchange.splits + part] = received

    def wait(self) -> None:
        for pushing in self._pushing:
            pushing.result()
        self._pushing.clear()
        if self._far is not None:
            self._far.await_sends()

    def release(self) -> None:
        self.exchange.released(self.number)

    def problem(self) -> BaseException | None:
        failed = (pushing.exception() for pushing in self._pushing if pushing.done())
        return next((error for error in failed if error is not None), None)

    @property
    def for_the_host(self) -> list[int]:
        """Chunks from other machines: no kernel can wait for them, as `missing` raises their flags."""
        return list(self._received)

    def missing(self, chunk: int) -> str:
        """Why the chunk is not there before time runs out; nothing once it is."""
        if received := self._received.pop(chunk, None):
            try:
                received.wait()
            except RuntimeError as error:
                return str(error)
            self.flags[chunk].clamp_(min=self.number)  # the next call may have raised it already
        deadline = time.monotonic() + self.exchange.timeout
        while int(self.flags[chunk]) < self.number:
            if time.monotonic() > deadline:
                return f"the host waited {self.exchange.timeout:g} s"
            time.sleep(POLL_SECONDS)
        return ""


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
