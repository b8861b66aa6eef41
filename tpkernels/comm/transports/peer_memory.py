"""Reading tensors of another process of this machine: the system copies them, once, from memory to memory.

The other process does nothing meanwhile. Its tensors may lie anywhere; it must not change or free them until
it is told that they were read. A system may forbid it (containers, Yama): so a few bytes are tried first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_RUNS = 1024  # of a call: IOV_MAX
MOST_BYTES = 2**30  # of a call, which ends early at 2 GiB: no run may be longer
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
    def byte_count(self) -> int:
        return prod(self.shape) * self.item_bytes

    @property
    def run_bytes(self) -> int:
        """Return how many bytes are contiguous, in the order of the elements."""
        return self._run()[0]

    def runs(self, length: int) -> Tensor:
        """Return where runs of `length` bytes begin, in the order of elements. length: divides `run_bytes`"""
        whole, outer = self._run()
        starts = torch.tensor([self.address])
        for size, stride in (*zip(self.shape[:outer], self.strides, strict=False), (whole // length, length)):
            starts = (starts[:, None] + torch.arange(size) * stride).flatten()
        return starts

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
    found = torch.zeros(_TRIAL, dtype=torch.uint8)
    runs = Runs.of(Located(trial.address, (_TRIAL,), (1,), 1), Located.of(found))
    try:
        read(trial.process, runs)
    except (OSError, AttributeError, ValueError):  # forbidden, not there, or no such call in this system
        return False
    return bytes(found.tolist()) == trial.content


class Runs(NamedTuple):
    """Runs of bytes to copy from another process: addresses and sizes of both ends, (runs, 2)."""

    there: Tensor
    here: Tensor

    @classmethod
    def of(cls, source: Located, target: Located) -> Runs:
        """Return the runs that copy one tensor to another of the same shape and size of items."""
        assert (target.shape, target.item_bytes) == (source.shape, source.item_bytes), (source, target)
        # both are products of the last sizes: one divides the other
        length = min(source.run_bytes, target.run_bytes)
        if not source.byte_count:
            return cls(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64))
        if length == source.byte_count:
            return cls(torch.tensor([[source.address, length]]), torch.tensor([[target.address, length]]))
        sides = (
            torch.stack([starts, torch.full_like(starts, length)], dim=1)
            for starts in (source.runs(length), target.runs(length))
        )
        return cls(*sides)

    @classmethod
    def joined(cls, some: Sequence[Runs]) -> Runs:
        return some[0] if len(some) == 1 else cls(*(torch.cat(side) for side in zip(*some, strict=True)))


def read(process: int, runs: Runs) -> None:
    """Copy runs of bytes from another process, in as few calls as the system allows."""
    there, here = runs
    ends = here[:, 1].cumsum(0)
    first = done = 0
    while first < len(ends):
        last = min(first + _MOST_RUNS, int(torch.searchsorted(ends, done + MOST_BYTES, right=True)))
        expected = int(ends[last - 1]) - done
        offset, count = first * 2 * here.element_size(), last - first
        found = _call()(process, here.data_ptr() + offset, count, there.data_ptr() + offset, count, 0)
        if found != expected:
            number = ctypes.get_errno() if found < 0 else 0
            why = os.strerror(number) if number else f"{found} of {expected} bytes could be read"
            raise ConnectionError(f"the memory of process {process} cannot be read: {why}")
        first, done = last, done + expected


@cache
def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return call
