"""The `shared` transport: ranks that are processes of one machine exchange through memory they all map.

The memory has no name, so that nothing is left behind however a rank ends: each rank makes an anonymous file,
the others open it by way of its process, and the system frees it with the last of them.
"""

from __future__ import annotations

import mmap
import os
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.transport import Exchange, Mailbox, require_shape

T = TypeVar("T")


def open_shared(
    name: str,
    group: ProcessGroup,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    splits: int = 1,
    timeout: float = 60.0,
) -> Exchange:
    """Our end of an exchange among the ranks of `group`; all call this with equal arguments.

    shape: (rows, cols) of a piece
    timeout: seconds until a rank that does not read is an error
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    wanted = (name, tuple(shape), dtype, splits)
    refusal, descriptor = "", -1
    try:
        require_shape(name, ranks, shape, splits)
        count = sum(Mailbox.sizes(ranks, shape, dtype, splits))
        descriptor = os.memfd_create(f"tpkernels {name}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, count)
    except (ValueError, OSError) as error:
        refusal = f"{type(error).__name__}: {error}"
    # a rank that cannot go on says so here: nobody waits for it below
    offers = _exchanged((wanted, f"/proc/{os.getpid()}/fd/{descriptor}", refusal), ranks, group)
    try:
        for peer, (theirs, _, reason) in enumerate(offers):
            if reason:
                raise RuntimeError(f"open_shared on rank {rank}: rank {peer} could not open {name}: {reason}")
            if theirs != wanted:
                raise ValueError(
                    f"open_shared on rank {rank}: expected equal arguments on all ranks, got {wanted} here "
                    f"and {theirs} on rank {peer}"
                )
        memories, reason = _mapped([path for _, path, _ in offers], count)
        reasons = _exchanged(reason, ranks, group)  # also: all have mapped it, so descriptors may close
        for peer, reason in enumerate(reasons):
            if reason:
                raise RuntimeError(
                    f"open_shared on rank {rank}: rank {peer} cannot reach the others' memory ({reason}): "
                    "the ranks must be processes of one user on one machine; use another transport"
                )
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    mailboxes = [Mailbox.over(memory, ranks, shape, dtype, splits) for memory in memories]
    return Exchange(name, rank, mailboxes, splits, timeout)


def _mapped(paths: list[str], count: int) -> tuple[list[Tensor], str]:
    memories = []
    try:
        for path in paths:
            with open(path, "r+b", buffering=0) as file:
                memories.append(torch.frombuffer(mmap.mmap(file.fileno(), count), dtype=torch.uint8))
    except (OSError, ValueError) as error:
        return [], f"{type(error).__name__}: {error}"
    return memories, ""


def _exchanged(value: T, ranks: int, group: ProcessGroup) -> list[T]:
    """What each rank brought, in the order of ranks."""
    values: list[T] = [value] * ranks
    dist.all_gather_object(values, value, group=group)
    return values
