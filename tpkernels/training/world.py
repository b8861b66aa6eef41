"""Joining the ranks that a launcher started, so that a restart meets nobody of the attempt before."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore


def join_world(backend: str, timeout: timedelta | None = None) -> None:
    """As `init_process_group(backend)`, also in a process that torchrun has restarted.

    timeout: of each collective; by default the backend's own
    """
    store, rank, size = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun keeps its store over restarts, and with it addresses of processes that are dead. On several
        # machines each counts its own restarts, so that the number cannot tell attempts apart.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
