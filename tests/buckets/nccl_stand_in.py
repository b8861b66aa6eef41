"""NCCL's communicator and torch's pools of GPU memory, as far as registration goes, on the CPU.

They keep to the rules, and note who breaks them: a pool is registered once its communicator is connected,
deregistered before it is freed, and a communicator that has ended is not asked.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.buckets import registered


class Pool:
    """`torch.cuda.MemPool`: each tensor has a segment, and lies at `offset` in it."""

    world: World

    def __init__(self, allocator):
        assert allocator == "ncclMemAlloc"
        self.tensors = []
        self.world.said.append("pool")

    def snapshot(self):
        return [
            {"address": address - self.world.offset, "total_size": self.world.offset + nbytes}
            for address, nbytes, _ in self.tensors
        ]

    def alive(self):
        return [storage for _, _, storage in self.tensors if not storage.expired()]

    def __del__(self):
        self.world.said.append("freed")
        if self.alive():
            self.world.broken.append("freed with tensors in it")
        if self.world.lives() and id(self) in self.world.pools:
            self.world.broken.append("freed while it was registered")


class _Noting(TorchDispatchMode):
    """What is allocated meanwhile belongs to a pool."""

    def __init__(self, pool, world):
        super().__init__()
        self.pool, self.world = pool, world

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if len(self.world.said) and self.world.fails_at == "zeros" and self.world.is_large(args):
            raise torch.OutOfMemoryError("planted: no memory")
        out = func(*args, **(kwargs or {}))
        self.pool.tensors.append((out.data_ptr(), out.nbytes, StorageWeakRef(out.untyped_storage())))
        return out


class World:
    """What happened in this rank, in order, and the communicator of its group.

    fails_at: what raises here: "register", "register the buckets", "zeros", "deregister"
    offset: where tensors begin in their segments
    times: (registered, plain) ms that are measured here
    """

    mem_allocator = "ncclMemAlloc"

    def __init__(self, group, fails_at="", offset=0, times=(1.0, 2.0), backend="nccl"):
        self.group, self.fails_at, self.offset, self.times, self.backend = (
            group, fails_at, offset, times, backend
        )  # fmt: skip
        self.said: list[str] = []
        self.broken: list[str] = []
        self.pools: set[int] = set()
        self.connected = False

    def name(self):
        return self.backend

    def lives(self):
        return self.group in distributed_c10d._world.pg_map

    def is_large(self, args):
        return args and args[0] != [1]

    def register_mem_pool(self, pool):
        self.said.append("register")
        if not self.connected:
            self.broken.append("registered before it was connected")
        sizes = [nbytes for _, nbytes, _ in pool.tensors]
        if self.fails_at == "register" or (self.fails_at == "register the buckets" and sizes != [1]):
            raise RuntimeError("planted: cannot register")
        self.pools.add(id(pool))

    def deregister_mem_pool(self, pool):
        self.said.append("deregister")
        if not self.lives():
            self.broken.append("asked after its end")
        if self.fails_at == "deregister" or id(pool) not in self.pools:
            raise RuntimeError("planted: not registered")
        self.pools.remove(id(pool))

    def milliseconds(self, group, flats, reduction):
        self.said.append(f"time {reduction}")
        assert not any(flat.any() for flat in flats)
        return list(self.times[: len(flats)])

    def reduced(self, group, data, *arguments):
        self.connected = True
        return start_all_reduce(group, data, *arguments)


start_all_reduce = registered.start_all_reduce


@contextmanager
def standing_in(group, **planted) -> Iterator[World]:
    """As if `group` were NCCL's, and the CPU a GPU."""
    world = World(group, **planted)
    pool = type("MemPool", (Pool,), {"world": world})
    with ExitStack() as patches:
        for where, name, new in (
            (torch.cuda, "MemPool", pool),
            (torch.cuda, "use_mem_pool", lambda pool, device: _Noting(pool, world)),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "synchronize", lambda device=None: world.said.append("synchronize")),
            (registered, "may_serve", lambda device: True),
            (registered, "backend_of", lambda group, device: world),
            (registered, "milliseconds", world.milliseconds),
            (registered, "start_all_reduce", world.reduced),
        ):
            patches.enter_context(patch.object(where, name, new))
        try:
            yield world
        finally:
            world.fails_at = ""
            registered._held.clear()


def left_held(wanted: int) -> int:
    """How much memory is held, once it is as much as wanted: gloo's threads let go a little after `wait`."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        registered.give_back_unused()
        if len(registered._held) <= wanted or time.monotonic() > deadline:
            return len(registered._held)
        time.sleep(0.01)
