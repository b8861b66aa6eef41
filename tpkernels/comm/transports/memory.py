"""The memory that ranks of a machine write for each other: slots for rows, and flags that tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tpkernels.comm.schedule import SLOTS, chunk_rows

# Words that kernels look at begin at multiples of 16 bytes, in either slot: Triton compiles a kernel anew for
# other addresses, which it cannot do in a capture after a call in the other slot.
ALIGNED_WORDS = 4


Words = Sequence[Sequence[int]]  # of each slot: the awaited one, and its flags


class SharedMemory(Protocol):
    """Memory that a rank shares with others, as a dump asks for it."""

    def words(self) -> Words:
        """Return awaited words and flags; may wait for a device."""

    def state(self, words: Words | None) -> list[str]:
        """Describe calls, and words if they are known."""

    def missed(self) -> str:
        """Return what a replay of a graph has missed; an empty text if nothing."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The memory of one rank that all ranks of its machine can write."""

    flags: Tensor  # (SLOTS, R * splits) int32
    released: Tensor  # (1,) int32: the last epoch that its owner has read
    buffers: Tensor  # (SLOTS, R * rows, cols)


@dataclass(frozen=True)
class Layout:
    """The layout of mailboxes: each rank sends each a matrix of one shape, in `splits` chunks."""

    ranks: int
    shape: tuple[int, int]
    dtype: torch.dtype
    splits: int = 1

    @property
    def chunk_rows(self) -> int:
        return chunk_rows(self.shape[0], 1, self.splits)

    @property
    def _slot_words(self) -> int:
        """Flags of a slot, up to where those of the next begin."""
        return -(-self.ranks * self.splits // ALIGNED_WORDS) * ALIGNED_WORDS

    @property
    def _word_bytes(self) -> int:
        """Up to a boundary that suits the data behind the words."""
        return -(-4 * (SLOTS * self._slot_words + 1) // 64) * 64

    @property
    def byte_count(self) -> int:
        rows, cols = self.shape
        return self._word_bytes + SLOTS * self.ranks * rows * cols * self.dtype.itemsize

    def mailbox(self, memory: Tensor) -> Mailbox:
        """Return the mailbox in these zeroed bytes."""
        integers = memory[: self._word_bytes].view(torch.int32)
        flags = integers[: SLOTS * self._slot_words].view(SLOTS, -1)[:, : self.ranks * self.splits]
        rows, cols = self.shape
        buffers = (
            memory[self._word_bytes : self.byte_count].view(self.dtype).view(SLOTS, self.ranks * rows, cols)
        )
        return Mailbox(flags, integers[SLOTS * self._slot_words :][:1], buffers)

    def require_rows(self, name: str) -> None:
        """Raise an error unless each rank has at least one row, in chunks that divide its rows."""
        if self.ranks < 1 or min(self.shape) < 1:
            raise ValueError(
                f"{name}: expected at least one rank and pieces that are not empty, got {self.ranks}, "
                f"{self.shape}"
            )
        chunk_rows(self.shape[0], 1, self.splits)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"pieces of {tuple(self.shape)} {dtype} in {self.splits} parts"


class Landing:
    """Where one rank's rows land in one slot of another rank, and their flags."""

    def __init__(self, mailbox: Mailbox, slot: int, rank: int, layout: Layout) -> None:
        """rank: who sends"""
        rows, splits = layout.shape[0], layout.splits
        self.rows = mailbox.buffers[slot, rank * rows : (rank + 1) * rows]
        self.chunks: tuple[Tensor, ...] = self.rows.split(layout.chunk_rows)
        self.flags = mailbox.flags[slot, rank * splits : (rank + 1) * splits]
        self.words = self.flags.view(torch.uint32)

    def rows_of(self, chunks: range) -> Tensor:
        """Return the rows of these chunks; each view is made once."""
        if len(chunks) == len(self.chunks):
            return self.rows
        if len(chunks) == 1:
            return self.chunks[chunks.start]
        size = self.chunks[0].shape[0]
        return self.rows[chunks.start * size : chunks.stop * size]


class Departing(NamedTuple):
    """What `kernels.waits.Departures` needs: where a kernel stores this rank's rows for each owner."""

    slots: Tensor  # (R,) int64: addresses of (rows, cols)
    flags: Tensor  # (R,) int64: addresses of the flags of their chunks
    counters: Tensor  # (R * splits,) int32 zeros
    awaited: Tensor  # (1,) int32: what the flags are set to
