"""Where what lies in the memory that a rank shares with others of its machine: doorbell, words, buckets."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LINE_BYTES = 64  # of a cache
WORD_BYTES = 8
DOORBELL_WORDS = 2  # as in csrc/doorbell.h
BUCKET_WORDS = 2  # as in csrc/shared_sums.h


class Bucket(NamedTuple):
    """What memory is for."""

    elements: int
    dtype: torch.dtype
    marked: bool  # summed over the tensor-parallel group first


class Part(NamedTuple):
    """What ranks of one group see of a rank's memory."""

    doorbell: Tensor
    words: Tensor
    flats: list[Tensor]  # the marked, or all


class MemoryMap:
    """Byte offsets. What tensor-parallel ranks see comes first: their other buckets are of other sizes."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._offsets = [0] * len(buckets)
        self._marked = [number for number, bucket in enumerate(buckets) if bucket.marked]
        self.byte_count = 0
        self._take(DOORBELL_WORDS * WORD_BYTES)
        self._marked_words = self._take(len(self._marked) * BUCKET_WORDS * WORD_BYTES)
        self._place(marked=True)
        self.marked_byte_count = self.byte_count
        self._words = self._take(len(buckets) * BUCKET_WORDS * WORD_BYTES)
        self._place(marked=False)

    def part(self, memory: mmap.mmap, *, marked: bool) -> Part:
        """Of a rank's memory, what tensor-parallel ranks see (`marked`) or data-parallel ones."""
        numbers = self._marked if marked else range(len(self._buckets))
        words, bucket_words = self._marked_words if marked else self._words, BUCKET_WORDS * len(numbers)
        wanted = [(*self._buckets[number][:2], self._offsets[number]) for number in numbers]
        return Part(
            _view(memory, DOORBELL_WORDS, torch.int64, 0),
            _view(memory, bucket_words, torch.int64, words),
            [_view(memory, elements, dtype, offset) for elements, dtype, offset in wanted],
        )

    def _place(self, *, marked: bool) -> None:
        for number, bucket in enumerate(self._buckets):
            if bucket.marked == marked:
                self._offsets[number] = self._take(bucket.elements * bucket.dtype.itemsize)

    def _take(self, count: int) -> int:
        offset = self.byte_count
        self.byte_count += -(-count // LINE_BYTES) * LINE_BYTES
        return offset


def _view(memory: mmap.mmap, count: int, dtype: torch.dtype, offset: int) -> Tensor:
    """A storage of its own, which keeps the memory."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
