"""Reading tensors of another process of this machine: the system copies them, once, from memory to memory.

The other process does nothing meanwhile. Its tensors may lie anywhere; it must not change or free them until
it is told that they were read. A system may forbid it (containers, Yama): so a few bytes are tried first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_RUNS = 1024  # of a call on either side: IOV_MAX
_TRIAL = 32


class Located(NamedTuple):
    """The address, shape and strides of a tensor in the memory of some process."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    item_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Located:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        return cls(tensor.data_ptr(), tuple(tensor.shape), strides, size)

    def part(self, begins: Sequence[int], shape: Sequence[int]) -> Located:
        """Return the view that begins at these indices."""
        offset = sum(begin * stride for begin, stride in zip(begins, self.strides, strict=True))
        return self._replace(address=self.address + offset, shape=tuple(shape))

    @property
    def run_bytes(self) -> int:
        """Return how many bytes are contiguous, in the order of the elements."""
        return self._run()[0]

    def runs(self) -> Tensor:
        """Return addresses and sizes of the pieces, in the order of elements: (runs, 2)."""
        length, outer = self._run()
        if not outer:
            return torch.tensor([[self.address, length]], device="cpu")
        starts = torch.tensor([self.address], device="cpu")
        for size, stride in zip(self.shape[:outer], self.strides, strict=False):
            starts = (starts[:, None] + torch.arange(size, device="cpu") * stride).flatten()
        return torch.stack([starts, torch.full_like(starts, length)], dim=1)

    def _run(self) -> tuple[int, int]:
        """Bytes of a run, and how many dimensions number the runs."""
        length = self.item_bytes
        for dim in reversed(range(len(self.shape))):
            if self.shape[dim] != 1:
                if self.strides[dim] != length:
                    return length, dim + 1
                length *= self.shape[dim]
        return length, 0


class Trial(NamedTuple):
    """Bytes that another process reads to find out whether it can."""

    process: int
    address: int
    content: bytes


@cache
def _own_bytes() -> Tensor:
    return torch.frombuffer(bytearray(os.urandom(_TRIAL)), dtype=torch.uint8)


def own_trial() -> Trial:
    """Return the bytes that other processes try to read of this one."""
    own = _own_bytes()
    return Trial(os.getpid(), own.data_ptr(), bytes(own.tolist()))


def can_read(trial: Trial) -> bool:
    """Whether this process can read the memory of the process that made `trial`."""
    found = torch.zeros(_TRIAL, dtype=torch.uint8, device="cpu")
    try:
        read(trial.process, Located(trial.address, (_TRIAL,), (1,), 1).runs(), Located.of(found).runs())
    except (OSError, AttributeError, ValueError):  # forbidden, not there, or no such call in this system
        return False
    return bytes(found.tolist()) == trial.content


def read(process: int, there: Tensor, here: Tensor) -> None:
    """Copy runs of another process, one after the other, into runs of this one, which may be cut otherwise.

    there, here: addresses and sizes, (runs, 2), of as many bytes; they are overwritten
    """
    sides = [(side, side[:, 1].cumsum(0)) for side in (here, there)]
    firsts, done, size = [0, 0], 0, int(here[:, 1].sum())
    while done < size:
        vectors: list[int] = []
        for (side, _), first in zip(sides, firsts, strict=True):
            vectors += side[first:].data_ptr(), min(len(side) - first, _MOST_RUNS)
        found = _call()(process, *vectors, 0)  # as many bytes as both sides have, or at most 2 GiB
        if found <= 0:
            number = ctypes.get_errno() if found < 0 else 0
            why = os.strerror(number) if number else f"{done} of {size} bytes could be read"
            raise ConnectionError(f"the memory of process {process} cannot be read: {why}")
        done += found
        if done == size:
            return
        for number, (side, ends) in enumerate(sides):
            first = firsts[number] = int(torch.searchsorted(ends, done, right=True))
            rest = int(ends[first]) - done
            side[first, 0] += int(side[first, 1]) - rest
            side[first, 1] = rest


@cache
def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return call
