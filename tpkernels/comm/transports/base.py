"""Chunks pushed into the other ranks' memory, and flags raised after them: what overlapped kernels wait on.

An `Exchange` belongs to one rank of R and one shape. Call number e, its epoch, gives every rank one piece of
each rank, cut into parts:

    delivery = exchange.begin(call)
    delivery.push(peer, part, rows)    returns at once; rows of our piece for that peer
    delivery.slots    (R, rows, cols)  piece of rank r at index r; valid once its flags are up
    delivery.flags    (R * splits,)    int32: flag r * splits + i is `awaited` once part i of it is there
    delivery.awaited  (1,)             int32: e and a code of the call, which other calls do not have

A gather pushes its shard to all; a reduce-scatter pushes row block d of its product to rank d. All ranks push
to the others in the order of `schedule.peers_by_step`, and the parts of a piece in theirs.
`delivery.release()` says that the slots have been read; `delivery.wait()` that our own pieces are out, so
that their memory may change. Both must happen, in any order, before the call after the next.

Each rank has two slot buffers and two rows of flags, used in turn: a call is pushed while its receivers still
read the one before. A flag is compared by equality: rows of another call, made by a rank that left the common
order, are never taken for this one's.
How memory is mapped, who pushes, and what keeps writers off slots that are being read, is the transport's:
`host`, `shared`, `symmetric`. What goes to other machines is `far`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import SLOTS, chunk_rows, peers_by_step, reusable_after, slot_of
from tpkernels.comm.transports.inter_node import FarCall


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The memory of one rank that all ranks of its machine can write."""

    flags: Tensor  # (SLOTS, R * splits) int32
    released: Tensor  # (1,) int32: the last epoch that its owner has read
    buffers: Tensor  # (SLOTS, R, rows, cols)

    @staticmethod
    def sizes(ranks: int, shape: tuple[int, int], dtype: torch.dtype, splits: int) -> tuple[int, int]:
        """Bytes of the words, up to a boundary that suits the data, and of the buffers."""
        words = -(-4 * (SLOTS * ranks * splits + 1) // 64) * 64
        return words, SLOTS * ranks * shape[0] * shape[1] * dtype.itemsize

    @staticmethod
    def over(memory: Tensor, ranks: int, shape: tuple[int, int], dtype: torch.dtype, splits: int) -> Mailbox:
        """The mailbox that zeroed bytes stand for."""
        words, data = Mailbox.sizes(ranks, shape, dtype, splits)
        integers = memory[:words].view(torch.int32)
        buffers = memory[words : words + data].view(dtype).view(SLOTS, ranks, *shape)
        flags = integers[: SLOTS * ranks * splits]
        return Mailbox(flags.view(SLOTS, ranks * splits), integers[len(flags) :][:1], buffers)


class Exchange(ABC):
    """One rank's end: `begin` a call, push, read its `Delivery`, `release` it."""

    margin = 0  # processors that a waiting kernel leaves to those who push

    def __init__(
        self,
        name: str,
        rank: int,
        mailboxes: Sequence[Mailbox | None],
        splits: int,
        timeout: float,
    ) -> None:
        """One rank's end of an exchange.

        mailboxes: of all ranks, in order; None for ranks on other machines
        timeout: seconds until a rank that does not come is an error
        """
        self.name, self.rank, self.ranks = name, rank, len(mailboxes)
        self.splits, self.timeout = splits, timeout
        self.near = frozenset(peer for peer, mailbox in enumerate(mailboxes) if mailbox is not None)
        own = mailboxes[rank]
        assert own is not None, "everybody reaches its own memory"
        self.piece_shape: tuple[int, ...] = tuple(own.buffers.shape[2:])  # what each rank gives each rank
        self.dtype = own.buffers.dtype
        # where a kernel leaves word of a chunk that is late; for all calls
        self.status = torch.zeros(1, dtype=torch.int32, device=own.buffers.device)
        self._mailboxes = tuple(mailboxes)
        self._begun = 0

    def begin(self, call: Call | None = None) -> Delivery:
        """The next call; every rank must make it.

        call: of the group; None for virtual ranks of one process, which have none
        """
        if not self._mailboxes:
            raise RuntimeError(f"{self.name} on rank {self.rank} is closed: open another")
        epoch = self._begun + 1
        if self.read() < reusable_after(epoch):
            raise RuntimeError(
                f"{self.name} on rank {self.rank}: expected call {reusable_after(epoch)} to be released "
                f"before call {epoch} begins; has an error ended it? Then destroy the process group"
            )
        self._begun = epoch
        return self._delivery(epoch, self._mailbox(self.rank), call)

    def start(self, pieces: Sequence[Tensor], call: Call | None = None) -> Delivery:
        """Begin the next call and push all of it: piece d to rank d, the own one before this returns.

        pieces: R tensors of `piece_shape`; a gather passes the same one R times
        """
        if len(pieces) != self.ranks:
            raise ValueError(
                f"{self.name}: expected a piece for each of {self.ranks} ranks, got {len(pieces)}"
            )
        for piece in pieces:
            if tuple(piece.shape) != self.piece_shape or piece.dtype != self.dtype:
                raise ValueError(
                    f"{self.name}: expected pieces of shape {self.piece_shape} in {self.dtype}, got "
                    f"{tuple(piece.shape)} in {piece.dtype}: open an exchange for each shape"
                )
        delivery = self.begin(call)
        for peer in (self.rank, *(to for to, _ in peers_by_step(self.ranks, self.rank))):
            delivery.push_piece(peer, pieces[peer])
        return delivery

    def far_call(self, call: Call | None, slots: Tensor) -> FarCall | None:
        """What a call swaps with other machines, if there are any."""
        if len(self.near) == self.ranks:
            return None
        assert call is not None, "ranks on other machines are reached through their group"
        return FarCall(call, self.near, slots)

    def _mailbox(self, peer: int) -> Mailbox:
        mailbox = self._mailboxes[peer]
        assert mailbox is not None, "ranks on other machines are not written to"
        return mailbox

    def part_rows(self, part: int) -> slice:
        """The rows of a piece that are its part number `part`."""
        rows = chunk_rows(self.piece_shape[0], 1, self.splits)
        return slice(part * rows, (part + 1) * rows)

    @abstractmethod
    def read(self) -> int:
        """The last call that this rank has released."""

    @abstractmethod
    def late(self) -> int:
        """What kernels have left in `status`, as far as the host can know without waiting for them."""

    @abstractmethod
    def close(self) -> None:
        """Stop pushing and let go of the memory, which lives as long as some rank has it."""

    @abstractmethod
    def _delivery(self, epoch: int, own: Mailbox, call: Call | None) -> Delivery: ...


class Delivery(ABC):
    """One call in flight."""

    def __init__(
        self, exchange: Exchange, number: int, own: Mailbox, awaited: Tensor, call: Call | None
    ) -> None:
        self.exchange, self.number, self.awaited, self.call = exchange, number, awaited, call
        self.slots, self.flags = own.buffers[slot_of(number)], own.flags[slot_of(number)]
        self._far = exchange.far_call(call, self.slots)

    @property
    def status(self) -> Tensor:
        """(1,) int32 for kernels to leave word in, zero if all is well; one for all calls of the exchange."""
        return self.exchange.status

    def push_piece(self, peer: int, piece: Tensor) -> None:
        """All parts of a piece."""
        for part in range(self.exchange.splits):
            self.push(peer, part, piece[self.exchange.part_rows(part)])

    @abstractmethod
    def push(self, peer: int, part: int, rows: Tensor) -> None:
        """Send a part of our piece for `peer`, each part once, and raise its flag after it."""

    @abstractmethod
    def wait(self) -> None:
        """Until our own pieces are out; an error if a rank does not take them in time."""

    def problem(self) -> BaseException | None:
        """Why pushing has failed, if it has, as far as the host knows."""
        return None

    @abstractmethod
    def release(self) -> None:
        """The slots have been read: other ranks may write the call after the next."""


def code_of(call: Call | None) -> int:
    """What flags hold besides the epoch."""
    return 0 if call is None else call.tag


def require_shape(name: str, ranks: int, shape: tuple[int, int], splits: int) -> None:
    """A piece of at least one row that its parts divide."""
    if ranks < 1 or min(shape) < 1:
        raise ValueError(
            f"{name}: expected at least one rank and pieces that are not empty, got {ranks}, {shape}"
        )
    chunk_rows(shape[0], 1, splits)
