"""The `shared` transport: ranks that are processes of one machine exchange through memory they all map.

The memory has no name, so that nothing is left behind however a rank ends: each rank makes an anonymous file,
the others open it by way of its process, and the system frees it with the last of them.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import handshake
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.mailbox import Mailbox, offers_by_machine, require_shape


def open_shared(
    name: str,
    group: ProcessGroup,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # a value, never changed
    *,
    splits: int = 1,
    timeout: float = 60.0,
    op: str = "",
) -> HostExchange:
    """Our end of an exchange among the ranks of `group`; all call this with equal arguments.

    shape: (rows, cols) that each rank sends each rank
    timeout: seconds until a rank that does not read is an error
    op: who needs it, for errors
    """
    memories = map_shared(name, group, shape, dtype, device, splits, op=op)
    mailboxes: list[Mailbox | None] = [None] * group.size()
    for peer, memory in memories.items():
        mailboxes[peer] = Mailbox.over(memory, group.size(), shape, dtype, splits)
    return HostExchange(name, group.rank(), mailboxes, splits, timeout)


def map_shared(
    name: str,
    group: ProcessGroup,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    splits: int,
    *,
    op: str = "",
) -> dict[int, Tensor]:
    """Zeroed bytes for the mailbox of each rank on this machine, by its number in the group."""
    ranks = group.size()
    problem, descriptor, count = "", -1, 0
    try:
        if device.type != "cpu":
            raise ValueError(
                f"TPKERNELS_TRANSPORT=shared exchanges memory of the CPU, got {device}; use symmetric or c10d"
            )
        require_shape(name, ranks, shape, splits)
        count = sum(Mailbox.sizes(ranks, shape, dtype, splits))
        descriptor = os.memfd_create(f"tpkernels {name}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, count)
    except Exception as error:  # whatever it is, the others wait to be told
        problem = f"{type(error).__name__}: {error}"
    opening = handshake(op or "open_shared", f"opening {name}", group)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        # a rank that cannot go on says so here: nobody waits for it below
        here, paths = offers_by_machine(name, opening, problem, shape, dtype, splits, path)
        memories, problem = _mapped([paths[peer] for peer in here], count)
        offers_of_all(name, opening, problem)  # also: all have mapped it, so descriptors may close
        return dict(zip(here, memories, strict=True))
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _mapped(paths: list[str], count: int) -> tuple[list[Tensor], str]:
    memories = []
    try:
        for path in paths:
            with open(path, "r+b", buffering=0) as file:
                memories.append(torch.frombuffer(mmap.mmap(file.fileno(), count), dtype=torch.uint8))
    except Exception as error:
        return [], f"processes of one user reach each other's memory, it does not ({error!r}); use c10d"
    return memories, ""
