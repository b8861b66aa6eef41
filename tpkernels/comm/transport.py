"""Chunks pushed into the other ranks' memory, and flags raised after them: what overlapped kernels wait on.

An `Exchange` belongs to one rank of R and one shape. Call number e, its epoch, gives every rank one piece of
each rank: `start(pieces)` pushes piece d to rank d, and returns at once with where the pieces of the others
will appear. A gather pushes its shard to all; a reduce-scatter pushes row block d of its product to rank d.

    delivery.slots    (R, rows, cols)    piece of rank r at index r; valid once its flags are up
    delivery.flags    (R * splits,)      int32: flag r * splits + i holds e once part i of it is there
    delivery.epoch    (1,)               int32: e

`delivery.release()` says that the slots have been read; `delivery.wait()` that our own pieces are out, so
that their memory may change. Both must happen, in any order, before the call after the next.

Each rank has two slot buffers, used in turn. The hazards of writing after reading, and what excludes each:

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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.comm.schedule import SLOTS, chunk_rows, push_order, reusable_after, slot_of

POLL_SECONDS = 50e-6


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The memory of one rank that all ranks of the exchange can write."""

    flags: Tensor  # (R * splits,) int32
    released: Tensor  # (1,) int32: the last epoch that its owner has read
    buffers: Tensor  # (SLOTS, R, rows, cols)

    @staticmethod
    def sizes(ranks: int, shape: tuple[int, int], dtype: torch.dtype, splits: int) -> tuple[int, int]:
        """Bytes of the words, up to a boundary that suits the data, and of the buffers."""
        words = -(-4 * (ranks * splits + 1) // 64) * 64
        return words, SLOTS * ranks * shape[0] * shape[1] * dtype.itemsize

    @staticmethod
    def over(memory: Tensor, ranks: int, shape: tuple[int, int], dtype: torch.dtype, splits: int) -> Mailbox:
        """The mailbox that zeroed bytes stand for."""
        words, data = Mailbox.sizes(ranks, shape, dtype, splits)
        integers = memory[:words].view(torch.int32)
        buffers = memory[words : words + data].view(dtype).view(SLOTS, ranks, *shape)
        return Mailbox(integers[: ranks * splits], integers[ranks * splits :][:1], buffers)


class Exchange:
    """One rank's end: `start` a call, read its `Delivery`, `release` it."""

    def __init__(
        self, name: str, rank: int, mailboxes: Sequence[Mailbox], splits: int, timeout: float
    ) -> None:
        """mailboxes: of all ranks, in order; timeout: seconds until a rank that does not read is an error."""
        self.name, self.rank, self.ranks = name, rank, len(mailboxes)
        self.splits, self.timeout = splits, timeout
        self.status = torch.zeros(1, dtype=torch.int32)  # where a kernel leaves word of a chunk that is late
        self._mailboxes = tuple(mailboxes)
        self._epoch = 0
        self._pusher = ThreadPoolExecutor(1, thread_name_prefix=f"push of {name}")  # one: in order of epochs
        self._closing = threading.Event()

    @property
    def _own(self) -> Mailbox:
        if self._closing.is_set():
            raise RuntimeError(f"{self.name} on rank {self.rank} is closed: open another")
        return self._mailboxes[self.rank]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """(rows, cols) of what each rank gives each rank."""
        return tuple(self._own.buffers.shape[2:])

    def start(self, pieces: Sequence[Tensor]) -> Delivery:
        """Begin the next call; every rank must. Piece d goes to rank d, the own one before this returns.

        pieces: R tensors of `piece_shape`; a gather passes the same one R times
        """
        self._require(pieces)
        own = self._own
        epoch = self._epoch + 1
        if int(own.released) < reusable_after(epoch):
            raise RuntimeError(
                f"{self.name} on rank {self.rank}: expected call {reusable_after(epoch)} to be released "
                f"before call {epoch} starts: call release() on each delivery"
            )
        self._epoch = epoch
        self._put(self.rank, pieces[self.rank], epoch)
        pushing = self._pusher.submit(self._push_to_others, list(pieces), epoch)
        return Delivery(
            self, own.buffers[slot_of(epoch)], own.flags, torch.tensor([epoch], dtype=torch.int32), pushing
        )

    def _require(self, pieces: Sequence[Tensor]) -> None:
        dtype = self._own.buffers.dtype
        if len(pieces) != self.ranks:
            raise ValueError(
                f"{self.name}: expected a piece for each of {self.ranks} ranks, got {len(pieces)}"
            )
        for piece in pieces:
            if tuple(piece.shape) != self.piece_shape or piece.dtype != dtype:
                raise ValueError(
                    f"{self.name}: expected pieces of shape {self.piece_shape} in {dtype}, got "
                    f"{tuple(piece.shape)} in {piece.dtype}: open an exchange for each shape"
                )

    def _push_to_others(self, pieces: list[Tensor], epoch: int) -> None:
        for peer in push_order(self.rank, self.ranks)[1:]:
            self._wait_until_free(peer, epoch)
            self._put(peer, pieces[peer], epoch)

    def _wait_until_free(self, peer: int, epoch: int) -> None:
        deadline = time.monotonic() + self.timeout
        released = self._mailboxes[peer].released
        while int(released) < reusable_after(epoch):
            if self._closing.is_set():
                raise RuntimeError(f"{self.name} on rank {self.rank} was closed during call {epoch}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} on rank {self.rank}: call {epoch} waited {self.timeout:g} s for rank "
                    f"{peer} to read call {reusable_after(epoch)}, has read {int(released)}: is it alive?"
                )
            time.sleep(POLL_SECONDS)

    def _put(self, peer: int, piece: Tensor, epoch: int) -> None:
        """Write the piece part by part, each before its flag."""
        mailbox, rows = self._mailboxes[peer], chunk_rows(piece.shape[0], 1, self.splits)
        target = mailbox.buffers[slot_of(epoch), self.rank]
        for part in range(self.splits):
            there = slice(part * rows, (part + 1) * rows)
            target[there].copy_(piece[there])
            mailbox.flags[self.rank * self.splits + part] = epoch

    def release(self, epoch: int) -> None:
        """Tell all ranks that ours has read call number `epoch`, and the calls before."""
        self._own.released.fill_(epoch)

    def close(self) -> None:
        """Stop pushing and let go of the memory, which lives as long as some rank has it."""
        self._closing.set()
        self._pusher.shutdown(wait=True)
        self._mailboxes = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call in flight."""

    exchange: Exchange
    slots: Tensor  # (R, rows, cols)
    flags: Tensor  # (R * splits,) int32
    epoch: Tensor  # (1,) int32
    _pushing: Future[None]

    @property
    def status(self) -> Tensor:
        """(1,) int32 for kernels to leave word in, zero if all is well; one for all calls of the exchange."""
        return self.exchange.status

    def wait(self) -> None:
        """Return once our own pieces are out; an error if a rank does not take them in time."""
        self._pushing.result()

    def release(self) -> None:
        """The slots have been read: other ranks may write the call after the next."""
        self.exchange.release(int(self.epoch))


def open_loopback(
    name: str,
    ranks: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    splits: int = 1,
    timeout: float = 60.0,
) -> list[Exchange]:
    """The ends of an exchange among virtual ranks of this process, all in CPU memory.

    One thread may serve them all: it starts a call on every end before it computes on any.

    shape: (rows, cols) of a piece
    """
    require_shape(name, ranks, shape, splits)
    count = sum(Mailbox.sizes(ranks, shape, dtype, splits))
    mailboxes = [
        Mailbox.over(torch.zeros(count, dtype=torch.uint8), ranks, shape, dtype, splits) for _ in range(ranks)
    ]
    return [Exchange(name, rank, mailboxes, splits, timeout) for rank in range(ranks)]


def require_shape(name: str, ranks: int, shape: tuple[int, int], splits: int) -> None:
    """A piece of at least one row that its parts divide."""
    if ranks < 1 or min(shape) < 1:
        raise ValueError(
            f"{name}: expected at least one rank and pieces that are not empty, got {ranks}, {shape}"
        )
    chunk_rows(shape[0], 1, splits)
