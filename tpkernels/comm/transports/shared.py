"""The `shared` transport: ranks that are processes of one machine exchange through memory they all map.

The memory has no name, so that nothing is left behind however a rank ends: each rank makes an anonymous file,
the others open it by way of its process, and the system frees it with the last of them.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.mailbox import Mailbox, Opening


def open_shared(opening: Opening) -> HostExchange:
    """Our end of an exchange; all ranks of the group call this at once."""
    rank, layout, memories = opening.group.rank(), opening.layout, map_shared(opening)
    mailboxes: list[Mailbox | None] = [None] * layout.ranks
    for peer, memory in memories.items():
        mailboxes[peer] = layout.mailbox(memory)
    return HostExchange(opening.name, rank, layout, mailboxes, opening.timeout)


def map_shared(opening: Opening) -> dict[int, Tensor]:
    """Zeroed bytes for the mailbox of each rank on this machine, by its number in the group."""
    name, layout, problem, descriptor = opening.name, opening.layout, "", -1
    try:
        if opening.device.type != "cpu":
            raise ValueError(
                "TPKERNELS_TRANSPORT=shared exchanges memory of the CPU, got "
                f"{opening.device}; use symmetric or c10d"
            )
        layout.require_rows(name)
        descriptor = os.memfd_create(f"tpkernels {name}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, layout.byte_count)
    except Exception as error:  # whatever it is, the others wait to be told
        problem = f"{type(error).__name__}: {error}"
    call, path = opening.begin(), f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        # a rank that cannot go on says so here: nobody waits for it below
        here, paths = opening.offers(call, problem, path)
        memories, problem = _mapped([paths[peer] for peer in here], layout.byte_count)
        offers_of_all(name, call, problem)  # also: all have mapped it, so descriptors may close
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
