"""Chunks pushed into the other ranks' memory, and flags raised after them: what kernels can wait on.

A `MailboxExchange` belongs to one rank of R and one shape. Call number e, its epoch, is a `MailboxDelivery`:

    delivery.slots    (R, rows, cols)  what rank r sends at index r; valid once its flags are up
    delivery.flags    (R * splits,)    int32: flag r * splits + i is `awaited` once chunk i of it is there
    delivery.awaited  (1,)             int32: e and a code of the call, which other calls do not have

A gather pushes its shard to all; a reduce-scatter pushes row block d of its product to rank d. A kernel may
store them there itself: `departures()` says where, and `before_kernels_push()` comes before it. `end()` says
that the slots have been read, and waits until what we sent is out, so that its memory may change. It must
come before the call after the next.

Each rank has two slot buffers and two rows of flags, used in turn: a call is pushed while its receivers still
read the one before. A flag is compared by equality: rows of another call, made by a rank that left the common
order, are never taken for this one's. How memory is mapped, who pushes, and what keeps writers off slots that
are being read, is the transport's: `host`, `shared`, `symmetric`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import Call, blaming, handshake
from tpkernels.comm.schedule import CODE_BITS, SLOTS, Plan, Round, slot_of
from tpkernels.comm.transports.memory import ALIGNED_WORDS, Departing, Landing, Mailbox, Words
from tpkernels.comm.transports.memory import Layout as Layout
from tpkernels.comm.transports.order import CallOrder

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Meeting:
    """A request that all ranks of a group make alike when they build something together."""

    name: str
    group: ProcessGroup
    op: str = field(default="an exchange", kw_only=True)  # who needs it, for errors

    @property
    def title(self) -> str:
        """The name of the request in errors."""
        return f"{self.op}: {self.name}"

    def begin(self) -> Call:
        return handshake(self.op, f"opening {self.name}", self.group)


@dataclass(frozen=True)
class Opening(Meeting):
    """The request to open an exchange."""

    layout: Layout
    device: torch.device = _CPU
    timeout: float = 60.0  # seconds until a rank that does not come is an error


class MailboxExchange:
    """One rank's end of an exchange: `begin` a call, push, read its `MailboxDelivery`, `end` it."""

    host_waits: bool  # whether the host can wait for a chunk
    margin = 0  # SMs that a waiting kernel leaves to those who push

    def __init__(
        self, name: str, rank: int, layout: Layout, mailboxes: Sequence[Mailbox], timeout: float
    ) -> None:
        """One rank's end of an exchange.

        mailboxes: of all ranks, in order
        timeout: seconds until a rank that does not come is an error
        """
        self.name, self.rank, self.ranks, self.layout = name, rank, layout.ranks, layout
        self.shape, self.dtype, self.timeout = layout.shape, layout.dtype, timeout
        self.splits, self._chunk_rows = layout.splits, layout.chunk_rows
        self._all_chunks = range(layout.splits)
        self._mailboxes = tuple(mailboxes)
        own = self.mailbox(rank)
        device = own.flags.device
        # where a kernel leaves word of a chunk that is late, zero if all is well; for all calls
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.order = CallOrder()
        self.last_call = 0  # its number in the group
        self.captured = False  # whether a graph writes its memory, which is kept as long as the group then
        self.flag_kernels: Counting | None = None
        self.memories = tuple(own.buffers.unbind())  # of each slot
        # the same as kernels add it up, made once: as slots of all ranks, and as one
        self.slots = tuple(memory.view(self.ranks, *self.shape) for memory in self.memories)
        self.single_slots = tuple(memory[None] for memory in self.memories)
        self.flags = tuple(own.flags.unbind())
        words = torch.zeros(SLOTS, ALIGNED_WORDS, dtype=torch.int32, device=device)
        self.awaited = tuple(words[:, :1].unbind())
        self._landings = [
            [Landing(mailbox, slot, rank, layout) for mailbox in mailboxes] for slot in range(SLOTS)
        ]
        self._departing = [self._departing_to(slot) for slot in range(SLOTS)]
        self.tiles: dict[str, Any] = {}  # of kernels that wait or store, by operator, where ranks timed them

    def count_by(self, kernels: Counting) -> None:
        """Let `kernels` count the calls of captured graphs; called before each call."""
        self.flag_kernels = kernels

    def begin(self, call: Call | None, plan: Plan, cols: int, like: Tensor) -> MailboxDelivery:
        """Begin the next call, which every rank must make, and return its delivery.

        call: of the group; None for virtual ranks of one process, which have none
        """
        shape = plan.rows // self.ranks, cols
        if shape != self.shape or like.dtype != self.dtype:
            raise ValueError(
                f"{self.name}: expected pieces of shape {self.shape} in {self.dtype}, got {shape} in "
                f"{like.dtype}: open an exchange for each shape"
            )
        order = self.order
        if not self._mailboxes or order.begun - order.read >= SLOTS:  # quicker to see than to say
            refusal = order.refusal() if self._mailboxes else "it is closed: open another"
            op = "" if call is None else f"{call.op}: "
            raise RuntimeError(f"{op}{self.name} on rank {self.rank}: {refusal}")
        epoch, needs_barrier = order.begin()
        if call is not None:
            self.last_call = call.number
        return self._delivery(epoch, needs_barrier, plan, call)

    def mailbox(self, peer: int) -> Mailbox:
        return self._mailboxes[peer]

    def landing(self, slot: int, peer: int) -> Landing:
        """Return where this rank's rows land in the memory of `peer`."""
        return self._landings[slot][peer]

    def chunk_numbers(self, rows: slice) -> range:
        """Return the numbers of the chunks in these rows of the slots."""
        return range(rows.start // self._chunk_rows, rows.stop // self._chunk_rows)

    def chunks_of_ours(self, there: slice) -> range:
        """Return the numbers of this rank's chunks that land in these rows of another rank's memory."""
        if there.stop - there.start == self.shape[0]:  # which is quicker to see than to compute
            return self._all_chunks
        first = self.rank * self.splits
        return range(there.start // self._chunk_rows - first, there.stop // self._chunk_rows - first)

    def departing(self, slot: int) -> Departing:
        return self._departing[slot]

    def _departing_to(self, slot: int) -> Departing:
        """Made once: building tensors on a GPU holds up the host, and no graph could be captured."""
        landings, flags = [self.landing(slot, peer) for peer in range(self.ranks)], self.flags[slot]
        rows = [landing.rows.data_ptr() for landing in landings]
        return Departing(
            torch.tensor(rows, device=flags.device),
            torch.tensor([landing.flags.data_ptr() for landing in landings], device=flags.device),
            torch.zeros_like(flags),
            self.awaited[slot],
        )

    def released(self, number: int) -> None:
        """Mark call `number` as read; an earlier call may still be in use."""
        self.order.released(number)

    def missed(self) -> str:
        """Return the error of rows that came too late for a graph, which no call raises; else nothing."""
        if not self.captured or not (word := self.late()):
            return ""
        assert self.flag_kernels is not None, "it counts captured calls"
        kernel, chunk = self.flag_kernels.kernel_and_chunk(word)
        what = f"rows of rank {chunk // self.splits} (chunk {chunk}) did not arrive"
        cause = f"a wait of {kernel} ran out in a graph; results are not valid"
        return str(blaming("replay", what, self.name, self.rank, self.ranks, cause))

    def words(self) -> Words:
        """Return the awaited word and the flags of each slot, once they are copied from a GPU."""
        return [
            [int(awaited), *flags.tolist()] for awaited, flags in zip(self.awaited, self.flags, strict=False)
        ]

    def state(self, words: Words | None) -> list[str]:
        """Describe calls, and the epochs of flags as far as they are known, for a dump."""
        begun, where = self.order.begun, f"the last is call {self.last_call} of the group"
        lines = [
            f"{self.name}, {self.layout}: {begun} calls begun, {begun - self.order.read} of them in flight; "
            + ("replays of graphs are not counted" if self.captured else where)
        ]
        for slot, (awaited, *flags) in enumerate(words or ()):
            if not awaited:  # no call has had it yet
                continue
            late = []
            for peer in range(self.ranks):
                own = flags[peer * self.splits : (peer + 1) * self.splits]
                if missing := [flag for flag in own if flag != awaited]:
                    there = f"rank {peer} has sent {self.splits - len(missing)} of {self.splits} chunks"
                    late.append(f"{there}, the next one's flag has {_epoch(missing[0])}")
            said = "; ".join(late) or "all rows are there"
            lines.append(f"  slot {slot} awaits {_epoch(awaited)}: {said}")
        return lines

    @abstractmethod
    def late(self) -> int:
        """Return the word that kernels have left in `status`, without waiting for them."""

    @abstractmethod
    def close(self) -> None:
        """Stop pushing and let go of the memory, which lives as long as some rank has it."""

    def let_go(self) -> None:
        """Drop the references to the memory of all ranks."""
        self._mailboxes, self._landings, self._departing = (), [], []
        self.memories, self.slots, self.single_slots, self.flags = (), (), (), ()

    @abstractmethod
    def _delivery(
        self, epoch: int, needs_barrier: bool, plan: Plan, call: Call | None
    ) -> MailboxDelivery: ...


def _epoch(word: int) -> str:
    return f"epoch {word % 2**31 >> CODE_BITS} ({word % 2**32:#010x})"


class Counting(Protocol):
    """A kernel that flags of a captured graph need, see `kernels.flags`; the transports import none."""

    def advance(self, word: Tensor, awaited: Tensor, step: int, code: int) -> None:
        """word += step; awaited = word | code."""

    def kernel_and_chunk(self, word: int) -> tuple[str, int]:
        """Which kernel gave up waiting, and for which chunk, from a `status` other than 0."""


class MailboxDelivery:
    """A call in flight in memory that ranks share."""

    def __init__(self, exchange: MailboxExchange, number: int, plan: Plan, call: Call | None) -> None:
        self.exchange, self.number, self.plan, self.call = exchange, number, plan, call
        self.slot = slot = slot_of(number)
        self.memory, self.flags = exchange.memories[slot], exchange.flags[slot]
        self.awaited = exchange.awaited[slot]

    @property
    def slots(self) -> Tensor:
        """Return the received rows as (ranks, rows, cols)."""
        return self.exchange.slots[self.slot]

    @abstractmethod
    def move(self, round: Round, outgoing: Tensor, first_row: int) -> None:
        """Send the rows of a round.

        outgoing: rows of the matrix from `first_row` on, all that are sent among them
        """

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Put this rank's own rows next to those that arrive."""

    def departures(self) -> Departing:
        """Return where a kernel stores this rank's rows, once `before_kernels_push` has returned."""
        return self.exchange.departing(self.slot)

    @abstractmethod
    def before_kernels_push(self) -> None:
        """Wait for all that must precede a kernel that stores into other ranks' slots."""

    def await_rows(self, rows: slice) -> None:
        for chunk in self.exchange.chunk_numbers(rows):
            self.await_chunk(chunk)

    def await_chunk(self, chunk: int) -> None:
        if cause := self.missing(chunk):
            raise self.late_chunk(chunk, cause)

    def missing(self, chunk: int) -> str:
        """Return why the chunk did not arrive in time, as far as the host sees; an empty text once it has."""
        raise AssertionError("flags of a GPU are for kernels")

    def before_kernels_wait(self) -> None:
        """Wait, on the host or in the stream, for all that a kernel cannot wait for."""

    def late_chunk(self, chunk: int, cause: str) -> RuntimeError:
        """Return the error of a chunk that did not arrive."""
        exchange, problem = self.exchange, self.problem()
        if first := self.call is not None and self.call.calls.first_failure():
            cause = first
        elif problem is not None:
            cause += f"; this rank's own rows are not out either: {problem}"
        elif behind := "" if self.call is None else self.call.calls.behind():
            cause += f"; {behind}"
        what = f"rows of rank {chunk // exchange.splits} (chunk {chunk}) did not arrive"
        return blaming(self.op, what, exchange.name, exchange.rank, exchange.ranks, cause)

    @property
    def op(self) -> str:
        return self.exchange.name if self.call is None else self.call.op

    def problem(self) -> BaseException | None:
        """Return why pushing has failed, as far as the host knows, or None."""
        return None

    @abstractmethod
    def end(self) -> None:
        """Mark the slots as read: other ranks may write the call after the next. Wait until all is sent.

        An error if a rank does not take it in time.
        """
