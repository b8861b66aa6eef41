"""Memory that NCCL allocates and registers: it reads and writes there, without copies into its own buffers.

A pool has NCCL's allocator (`ncclMemAlloc`), tensors are made in it, and then its segments are registered
with the group's communicator (`ncclCommRegister`), of which other ranks hear nothing. What NCCL
and torch ask for:

- If one rank sends from registered memory, all do, at one offset of their segments; else anything may come.
- A segment is deregistered before it is freed: what lies at its address next would be taken for it.
- A communicator that has ended knows no segments any more, and must not be asked.

Symmetric windows (`register_mem_pool(pool, symm=True)`, NCCL 2.27) are left alone. To register one is a
collective, which hangs where another rank has failed; and in some versions of torch segments go in the order
of their addresses, which differ between ranks, and to abort a communicator with windows aborts the process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.comm.calls import is_alive
from tpkernels.comm.transports import select
from tpkernels.tp_invariance import mode

_CALLS = "mem_allocator", "register_mem_pool", "deregister_mem_pool"  # of torch's ProcessGroupNCCL


def may_serve(device: torch.device) -> bool:
    """What all ranks know without a word: nothing is asked, allocated or timed while a graph is captured."""
    return device.type == "cuda" and not is_capturing(device)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def why_not(group: ProcessGroup, device: torch.device) -> str:
    """Why this rank wants no registered memory, or cannot have it; nothing if it can."""
    if select.requested_transport == "c10d":
        return "TPKERNELS_TRANSPORT=c10d"
    if mode.segments or torch.are_deterministic_algorithms_enabled():
        return "a choice by time could change the bits of sums from run to run"
    if os.environ.get("NCCL_LOCAL_REGISTER") == "0":
        return "NCCL_LOCAL_REGISTER=0"
    backend = backend_of(group, device)
    if backend.name() != "nccl":
        return f"the backend for {device.type} is {backend.name()}"
    if missing := [call for call in _CALLS if not hasattr(type(backend), call)]:
        return f"{type(backend).__name__} of torch {torch.__version__} has no {missing[0]}"
    return "" if hasattr(torch.cuda, "MemPool") else f"torch {torch.__version__} has no torch.cuda.MemPool"


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


class NcclMemory:
    """Tensors in a pool of their own, which is registered with a group's communicator.

    Held weakly, the group: it may end before the tensors, and these before or after whoever made them.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """The communicator is connected already: no pool can be registered before."""
        self._group, self._device, self._process = ref(group), device, os.getpid()
        with torch.cuda.device(device):  # a pool belongs to the current one
            self._pool = torch.cuda.MemPool(backend_of(group, device).mem_allocator)
        self._storages: list[StorageWeakRef] = []
        self._registered = False

    def zeros(self, elements: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """A flat tensor for each, in this order, which decides where in a segment it lies."""
        with torch.inference_mode(False), torch.cuda.use_mem_pool(self._pool, self._device):
            flats = [
                torch.zeros(count, dtype=dtype, device=self._device)
                for count, dtype in zip(elements, dtypes, strict=True)
            ]
        self._storages += [StorageWeakRef(flat.untyped_storage()) for flat in flats]
        return flats

    def register(self) -> None:
        """Here only, without a word to other ranks."""
        group = self._group()
        assert group is not None, "whoever registers has the group"
        self._registered = True  # whatever comes of it: some segments may be, when another fails
        backend_of(group, self._device).register_mem_pool(self._pool)

    def layout(self, flats: Sequence[Tensor]) -> str:
        """A digest of where tensors lie in their segments: each rank's environment sets up its allocator."""
        places = []
        for flat in flats:
            address = flat.data_ptr()
            places += [
                (address - start, size) for start, size in self._segments() if start <= address < start + size
            ]
        if len(places) != len(flats):
            raise RuntimeError(f"{len(flats)} buckets were allocated, and the pool has {len(places)} of them")
        return hashlib.blake2b(repr(places).encode(), digest_size=16).hexdigest()

    def in_use(self) -> bool:
        """Whether a tensor, or a view of one, is left: a gradient that outlives its buckets, say."""
        return not all(storage.expired() for storage in self._storages)

    def end(self) -> bool:
        """Give the memory back, once nothing uses it; whether that is done, or another process's business."""
        if os.getpid() != self._process:
            return False  # CUDA does not survive a fork, nor does the communicator
        if is_capturing(self._device):
            return False  # which would end the capture
        if self._registered and (group := self._group()) is not None and is_alive(group):
            try:
                torch.cuda.synchronize(self._device)  # kernels of the last collective
                backend_of(group, self._device).deregister_mem_pool(self._pool)
            except RuntimeError:  # the communicator was aborted, say
                return False  # its addresses stay taken as long as the communicator may know them
        self._registered = False
        del self._pool
        return True

    def _segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._pool.snapshot()]
