"""Batches of ids from a file: the same sequence of them for any number of ranks, and from any step on.

A text is read as bytes, which are its ids. A `.bin` file holds ids as little-endian 16-bit numbers, as many
tools write them; a `.bin32` file as 32-bit ones. Files are mapped, not read: they may be larger than memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

_KINDS = {".bin": torch.uint16, ".bin32": torch.int32}


class TokenFile:
    """The ids of a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"data: {self.path} is not a file")
        dtype = _KINDS.get(self.path.suffix, torch.uint8)
        bytes_ = self.path.stat().st_size
        if bytes_ % dtype.itemsize:
            raise ValueError(
                f"data: expected {dtype.itemsize} bytes an id in {self.path}, got {bytes_} bytes"
            )
        count = bytes_ // dtype.itemsize
        if not count:
            raise ValueError(f"data: {self.path} is empty")
        self.is_text = dtype == torch.uint8
        self.ids = torch.from_file(str(self.path), size=count, dtype=dtype)

    def __len__(self) -> int:
        return len(self.ids)

    def slices(self, starts: Tensor, tokens: int) -> Tensor:
        """Return the ids from each start on: (starts, tokens)."""
        places = starts[:, None] + torch.arange(tokens)
        return self.ids[places].long()


class Excerpts:
    """Random excerpts of a file, step by step.

    The excerpts of a step depend on the seed and the step alone, and each data-parallel rank takes its share:
    so another number of ranks sees the same, and a run that goes on at step n sees what it would have seen.
    """

    def __init__(self, file: TokenFile, *, batch: int, tokens: int, seed: int, rank: int, ranks: int) -> None:
        """batch: excerpts a step, over all data ranks; tokens: in each"""
        if batch < 1 or batch % ranks:
            raise ValueError(f"batch: expected a multiple of the {ranks} data-parallel ranks, got {batch}")
        if not 1 <= tokens < len(file):
            raise ValueError(
                f"tokens: expected 1 to {len(file) - 1}, for {file.path} has {len(file)} ids, got {tokens}"
            )
        self.file, self._tokens, self._seed = file, tokens, seed
        self._batch, self._own = batch, slice(rank * batch // ranks, (rank + 1) * batch // ranks)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return ids and the ids that follow them, (excerpts of this rank, tokens) each."""
        # one generator a step: nothing has to be drawn again to reach it
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B1 + step) % 2**63)
        starts = torch.randint(len(self.file) - self._tokens, (self._batch,), generator=generator)
        excerpts = self.file.slices(starts[self._own], self._tokens + 1)
        return excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()
