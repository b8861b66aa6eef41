"""Memory that processes share, in a fork: a copy of its own, or what it writes there would be its parent's.

Forks are common (workers that load data), and gradients lie in such memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from weakref import WeakKeyDictionary, finalize

import torch

_descriptors: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()


def copy_in_forks(memory: mmap.mmap, descriptor: int) -> None:
    """Let forks of this process have a copy of `memory`, which maps the file that `descriptor` is of."""
    kept = os.dup(descriptor)
    finalize(memory, os.close, kept).atexit = False
    _descriptors[memory] = kept


def _copy_all() -> None:
    """In the child: pages are copied as it writes them. Its views find them where they were."""
    system = ctypes.CDLL(None)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10  # MAP_FIXED
    for memory, descriptor in _descriptors.items():
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        found = system.mmap(address, len(memory), access, mmap.MAP_PRIVATE | fixed, descriptor, 0)
        if found != address:  # rather than share what a fork must not write
            os.abort()


os.register_at_fork(after_in_child=_copy_all)
