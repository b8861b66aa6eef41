"""The `symmetric` transport: GPUs of one machine write into each other's memory, by torch's symmetric memory.

Copy engines push rows on a stream of their own, and behind each chunk its flag, in two modes:

- Eager, the default: the host knows the number of the call, and the stream writes it into the flags, behind a
  fence for the whole system (`cuStreamWriteValue32`). No kernel runs for it.
- Captured: once a CUDA graph has captured a call of an exchange, a kernel counts the calls of each slot on
  the device, and copies of that word raise the flags, so that a replay tells of another call. The exchange
  stays in this mode, outside of graphs, too. Its words have the sign bit, which eager ones have not.

The hazards of writing after reading, and what excludes each:

- Rows land in a slot that its owner still reads. `order` says why they do not if each call is read before
  the next begins: pushes come after the kernels that have read the call before, and these have seen the
  flags of all ranks. Any other call makes a barrier of all ranks first, and so does each call of a captured
  exchange, as a replay uses one slot again and again. It is made in the stream that pushes: the one that
  computes goes on. Only where a kernel stores into the slots itself it is made in that kernel's stream.
- A flag is seen before its rows: it is written behind them in one stream, after a fence, or copied behind
  their copy.
- The awaited word of a slot changes while a kernel waits for it: kernels of the slot's last call come before.
- Rows are changed while they are being pushed: `end()` lets the current stream wait for the pushes.
- A graph writes memory that was freed: an exchange that a graph has captured is kept as long as its group.

A kernel that waits may take all SMs, so nothing that it waits for may need one behind it. Copies to other
ranks and stream writes need none. A barrier does: a kernel that waits for rows behind a barrier is itself
enqueued behind the barrier of its own rank. Calls of one group in several streams take effect one after the
other, see `StreamOrder`.

A wait that has run out proves nothing: its rank raises, and what ranks compute from then on is not valid. In
replays nothing of ours runs on the host. There each captured call copies the word of late waits to the host,
where the watch of `calls` sees it and fails the group.

Not run on a GPU yet.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import CannotTakePart, built_by_all, offers_here, offers_of_all
from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import CODE_BITS, SLOTS, Plan, Round, Swap, flag_of, slot_of
from tpkernels.comm.side_stream import SideStream, StreamOrder
from tpkernels.comm.transports.mailbox import Counting, MailboxDelivery, MailboxExchange, Opening
from tpkernels.comm.transports.memory import Departing, Layout, Words
from tpkernels.comm.transports.rendezvous import (
    Handle,
    new_memory,
    rendezvous,
    require_gpu_each,
    sockets_place,
    waiting_for,
    why_no_barrier,
    why_no_stream_writes,
    why_not,
)
from tpkernels.extension import steps

_COPIES = 4  # SMs that a waiting kernel leaves free where ranks share a GPU: copies between them take some
_MOST_PUSHES = 512  # of parts of plans; an exchange has a plan or two, of as many parts as there are chunks
# until the host asks again for what waits of kernels have left in `status`; in a graph each call asks: its
# replays run nothing of ours on the host
LOOK_CALLS = 64
_COUNTED = -(2**31)  # the sign bit, of words that a device has counted
EPOCHS = 2 ** (31 - CODE_BITS)  # that the other bits of a flag tell apart


class Push(NamedTuple):
    """Addresses where rows land, and their flags, as `push` in C++ takes them."""

    landing: Tensor
    words: Tensor
    first_row: int  # of what is sent, if more is sent than lands here
    first_chunk: int  # the first of the words that are written
    chunks: int


Pushes = tuple[Push, ...]


class GroupStreams(NamedTuple):
    """Of all exchanges of a group: torch has 32 streams of a priority, and then gives them out again."""

    order: StreamOrder  # of its calls
    side: SideStream

    @staticmethod
    def of(device: torch.device) -> GroupStreams:
        return GroupStreams(StreamOrder(device), SideStream(device))


class SymmetricExchange(MailboxExchange):
    """One rank's end of an exchange in memory that all ranks of its machine can write."""

    host_waits = False

    def __init__(
        self,
        name: str,
        layout: Layout,
        handle: Handle,
        memory: Tensor,
        timeout: float,
        *,
        shares_gpu: bool = False,
        streams: GroupStreams | None = None,
    ) -> None:
        """One rank's end.

        memory: our own, zeroed bytes
        streams: of the group
        """
        mailboxes = [
            layout.mailbox(handle.get_buffer(peer, (memory.numel(),), torch.uint8))
            for peer in range(layout.ranks)
        ]
        super().__init__(name, handle.rank, layout, mailboxes, timeout)
        if shares_gpu:
            self.margin = _COPIES
        self.handle, self._memory = handle, memory
        self.stream_order, self.side = streams or GroupStreams.of(memory.device)
        self.awaited_words = [awaited.view(torch.uint32) for awaited in self.awaited]
        self._counts = torch.zeros(SLOTS, 1, dtype=torch.int32, device=memory.device).unbind()
        self._seen = self.status  # which the host sees on a CPU
        if not memory.is_cpu:
            self._seen = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=memory.is_cuda)
        self._seen_word = memoryview(self._seen.numpy().data)  # quick to look at
        self.in_flight: set[SymmetricDelivery] = set()
        # C++ writes words as `handle` does, if that is torch's own or says so
        writes = getattr(handle, "native_words", type(handle).__module__.startswith("torch."))
        self.native_push = getattr(steps(), "push", None) if writes else None
        self._pushes: dict[tuple[int, int, int], tuple[object, Pushes]] = {}  # by slot, and part of a plan

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """What is begun meanwhile moves nothing; its kernels are compiled, and do not wait."""
        self.begin = lambda call, plan, *_: _Rehearsal(self, 0, False, plan, 0, call, None)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.begin

    def pushes(self, slot: int, swaps: Sequence[Swap], first_row: int) -> Pushes:
        """Where rows go that are swapped. Made once for each part of a plan.

        first_row: of the matrix that the swaps' rows are cut out of
        """
        found = self._pushes.get((slot, id(swaps), first_row))
        if found is None or found[0] is not swaps:
            made = [self._push_to(slot, swap.to, swap.lands, swap.sent.start - first_row) for swap in swaps]
            found = self._keep_pushes(slot, swaps, first_row, tuple(made))
        return found[1]

    def own_push(self, slot: int, kept: slice) -> Pushes:
        """Where our own rows go."""
        found = self._pushes.get((slot, id(kept), 0))
        if found is None or found[0] is not kept:
            found = self._keep_pushes(slot, kept, 0, (self._push_to(slot, self.rank, kept, 0),))
        return found[1]

    def _push_to(self, slot: int, peer: int, there: slice, first_row: int) -> Push:
        landing, chunks = self.landing(slot, peer), self.chunks_of_ours(there)
        return Push(landing.rows_of(chunks), landing.words, first_row, chunks.start, len(chunks))

    def _keep_pushes(self, slot: int, part: object, first_row: int, made: Pushes) -> tuple[object, Pushes]:
        if len(self._pushes) >= _MOST_PUSHES:
            self._pushes.clear()
        self._pushes[slot, id(part), first_row] = part, made  # held, so that no other part gets its id
        return part, made

    def count_by(self, kernels: Counting) -> None:
        """And load them once: in a capture it would be too late."""
        if self.flag_kernels is None and self._memory.is_cuda:
            words = torch.zeros(2, 1, dtype=torch.int32, device=self._memory.device)
            kernels.advance(words[0], words[1], 1, 0)
        self.flag_kernels = kernels

    def late(self) -> int:
        """On a GPU as of the last `look` that is done: an error comes with a later call."""
        return self._seen_word[0]

    def look(self) -> None:
        """Let the host know what is in `status`, once the current stream has come so far."""
        self._seen.copy_(self.status, non_blocking=True)

    def words(self) -> Words:
        """Copied in a stream that does not wait for those in which calls hang."""
        with nullcontext() if self._memory.is_cpu else torch.Stream(self._memory.device, priority=-1):
            return super().words()

    def close(self) -> None:
        """Waits for the GPU: the memory goes at once, and not when the garbage collector comes by."""
        if not self._mailboxes:
            return
        if self._memory.is_cuda:
            torch.accelerator.synchronize(self._memory.device)
        if int(self.status):
            warnings.warn(
                f"{self.name} on rank {self.rank}: a kernel has waited in vain for rows of another rank; the "
                "results of the last calls are not valid",
                stacklevel=2,
            )
        self.in_flight.clear()
        for views in (self.awaited_words, self._pushes):
            views.clear()
        self.let_go()
        del self.handle, self._memory

    def barrier(self, channel: int) -> None:
        """Of all ranks of this machine, in the current stream. Streams have a channel each."""
        self.handle.barrier(channel, int(1000 * self.timeout))

    def _delivery(self, epoch: int, needs_barrier: bool, plan: Plan, call: Call | None) -> SymmetricDelivery:
        current = self.stream_order.current()  # now comes after the calls before
        slot, code = slot_of(epoch), 0 if call is None else call.tag
        capturing = self.stream_order.capturing()
        if self.captured or capturing:
            kernels = self._counting_kernels()
            kernels.advance(
                self._counts[slot], self.awaited[slot], flag_of(1, 0), _COUNTED | flag_of(0, code)
            )
            word = None
        else:
            word = flag_of(epoch, code) & ~_COUNTED
            self.handle.stream_write_value32(self.awaited_words[slot], 0, word)
        if capturing or epoch % LOOK_CALLS == 0:
            self.look()
        return SymmetricDelivery(self, epoch, needs_barrier or word is None, plan, word, call, current)

    def _counting_kernels(self) -> Counting:
        """From now on calls are counted on the device."""
        if self.flag_kernels is None:
            raise RuntimeError(
                f"{self.name}: a CUDA graph can capture calls only where our kernels compute: leave "
                "TPKERNELS_BACKEND at auto, or set TPKERNELS_TRANSPORT=c10d"
            )
        self.captured = True
        return self.flag_kernels


class SymmetricDelivery(MailboxDelivery):
    """A call in flight in the memory of GPUs."""

    exchange: SymmetricExchange

    def __init__(
        self,
        exchange: SymmetricExchange,
        number: int,
        needs_barrier: bool,
        plan: Plan,
        word: int | None,
        call: Call | None,
        current: torch.Stream | None,
    ) -> None:
        """word: what flags are set to; None if only the device knows

        current: the stream that was current when the call began, in which rows are computed and sent
        """
        super().__init__(exchange, number, plan, call)
        self._current = current
        self._needs_barrier, self._word = needs_barrier, word
        self._barrier: torch.Event | None = None
        self._held: list[Tensor] = []  # what the other stream reads must not be freed in this one

    def keep(self, rows: Tensor) -> None:
        self._put(self.exchange.own_push(self.slot, self.plan.kept), rows)

    def move(self, round: Round, outgoing: Tensor, first_row: int) -> None:
        if swaps := round.swaps:
            self._push(self.exchange.pushes(self.slot, swaps, first_row), outgoing)

    def _push(self, pushes: Pushes, outgoing: Tensor) -> None:
        """All behind what the current stream has so far."""
        exchange, current = self.exchange, self._current
        exchange.side.wait_for(current)
        with exchange.side.entered():
            if self._needs_barrier:
                exchange.barrier(0)
                self._barrier, self._needs_barrier = exchange.side.mark(), False
            self._put(pushes, outgoing)
        if not self._held:
            exchange.in_flight.add(self)
        self._held.append(outgoing)

    def _put(self, pushes: Pushes, outgoing: Tensor) -> None:
        """Rows where they land, each before its flags, in the current stream."""
        if self.exchange.native_push is not None and self._word is not None:
            self.exchange.native_push(outgoing, pushes, self._word)
            return
        for landing, words, first_row, first_chunk, chunks in pushes:
            rows = landing.shape[0]
            sent = outgoing if rows == outgoing.shape[0] else outgoing[first_row : first_row + rows]
            landing.copy_(sent, non_blocking=True)
            self._raise(words, range(first_chunk, first_chunk + chunks))

    def _raise(self, words: Tensor, chunks: range) -> None:
        """Flags, by the one way or the other."""
        if (word := self._word) is not None:
            write = self.exchange.handle.stream_write_value32
            for chunk in chunks:
                write(words, chunk, word)
        else:
            counted = self.exchange.awaited_words[self.slot]
            for chunk in chunks:
                words[chunk : chunk + 1].copy_(counted, non_blocking=True)

    def before_kernels_push(self) -> None:
        if self._needs_barrier:
            self._needs_barrier = False
            self.exchange.barrier(1)

    def before_kernels_wait(self) -> None:
        """A barrier still to come would find no processor."""
        current = self.exchange.stream_order.current()
        if self._barrier is not None and current is not None:
            current.wait_event(self._barrier)

    def end(self) -> None:
        """Have the current stream wait for the pushes: a capture fails unless they are joined at its end."""
        exchange = self.exchange
        current = exchange.stream_order.current()  # the next call comes after it
        exchange.order.released(self.number)
        if self._held:
            exchange.side.let(current)
            self._held.clear()
            exchange.in_flight.discard(self)


class _Rehearsal(SymmetricDelivery):
    """Call 0. No kernel waits: before the first call all flags are zero, and so is the word that they are
    compared with; later the last call of the slot has come.

    A kernel that pushes stores meaningless rows where this rank's own belong. A call comes later in its
    stream, and overwrites them.
    """

    def departures(self) -> Departing:
        slots, flags, counters, awaited = super().departures()
        own = self.exchange.landing(self.slot, self.exchange.rank)
        slots = torch.full_like(slots, own.rows.data_ptr())
        return Departing(
            slots, torch.full_like(flags, own.flags.data_ptr()), torch.zeros_like(counters), awaited
        )

    def move(self, round: Round, outgoing: Tensor, first_row: int) -> None: ...

    def keep(self, rows: Tensor) -> None: ...

    def end(self) -> None: ...


_streams_of: WeakKeyDictionary[ProcessGroup, GroupStreams] = WeakKeyDictionary()


def streams_of(group: ProcessGroup, device: torch.device) -> GroupStreams:
    """Made once for the group, which computes on one device."""
    if group not in _streams_of:
        _streams_of[group] = GroupStreams.of(device)
    return _streams_of[group]


def open_symmetric(opening: Opening) -> SymmetricExchange:
    """Open this rank's end of an exchange; all ranks of the group call this together."""
    name, group, layout, device = opening.name, opening.group, opening.layout, opening.device
    problem, gpu, memory = why_not(device), "", torch.empty(0)
    try:
        layout.require_rows(name)
        if not problem:
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            memory = new_memory(layout.byte_count, device)  # now: a rendezvous waits for all ranks
            problem = why_no_stream_writes(memory)
    except Exception as error:  # whatever it is, the others wait to be told
        problem = problem or f"{type(error).__name__}: {error}"
    call = opening.begin()
    offer = f"{gpu} {os.getpid()}"
    here, offers = offers_here(opening.title, call, problem, str(layout), offer, sockets_place())
    gpus = [theirs.rpartition(" ")[0] for theirs in offers]
    processes = {peer: int(offers[peer].rpartition(" ")[2]) for peer in here if peer != group.rank()}
    shares_gpu = require_gpu_each(opening.title, gpus, group.rank())
    offers_of_all(opening.title, call, why_no_barrier({peer: gpus[peer] for peer in here}))

    if len(here) < layout.ranks:  # on all ranks
        raise CannotTakePart(
            f"{opening.title}: torch hands memory over by sockets in TMPDIR, which is another folder on some "
            "ranks: set it alike on all, or use c10d"
        )

    def build() -> SymmetricExchange:
        with waiting_for(processes, opening.timeout):
            handle = rendezvous(memory, group.group_name)
        own = handle.get_buffer(handle.rank, (memory.numel(),), torch.uint8)
        assert own.data_ptr() == memory.data_ptr(), "the handle's memory begins where ours does"
        streams = streams_of(group, device)
        return SymmetricExchange(
            name, layout, handle, memory, opening.timeout, shares_gpu=shares_gpu, streams=streams
        )

    exchange = built_by_all(opening.title, call, build)
    exchange.barrier(0)  # nobody raises a flag before it has been zeroed
    return exchange
