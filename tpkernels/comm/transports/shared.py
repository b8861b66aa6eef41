"""The `shared` transport: ranks that are processes of one machine exchange through memory they all map.

The memory has no name, so that nothing is left behind however a rank ends: each rank makes an anonymous file,
the others open it by way of its process, and the system frees it with the last of them. So each knows the
processes of the others, and notices when one ends.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Mailbox
from tpkernels.comm.transports.processes import process_of


def open_shared(opening: Opening) -> HostExchange:
    """Our end of an exchange; all ranks of the group call this at once."""
    rank, layout, shared = opening.group.rank(), opening.layout, map_shared(opening)
    mailboxes: list[Mailbox | None] = [None] * layout.ranks
    for peer, (memory, _) in shared.items():
        mailboxes[peer] = layout.mailbox(memory)
    processes = {peer: process_of(number) for peer, (_, number) in shared.items() if peer != rank}
    return HostExchange(opening.name, rank, layout, mailboxes, opening.timeout, processes)


def map_shared(opening: Opening) -> dict[int, tuple[Tensor, int]]:
    """Of each rank on this machine, by its number in the group: zeroed bytes for its mailbox, its process."""
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
    number = 0 if problem else os.fstat(descriptor).st_ino
    call, offer = opening.begin(), f"{os.getpid()} {descriptor} {number}"
    try:
        # a rank that cannot go on says so here: nobody waits for it below
        here, offers = opening.offers(call, problem, offer)
        places = [_Place(*map(int, offers[peer].split())) for peer in here]
        memories, problem = _mapped(places, layout.byte_count)
        offers_of_all(name, call, problem)  # also: all have mapped it, so descriptors may close
        return {
            peer: (memory, place.process) for peer, memory, place in zip(here, memories, places, strict=True)
        }
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Place(NamedTuple):
    """Where a rank's memory is found."""

    process: int
    descriptor: int
    number: int  # of the file: where /proc is of other processes, another may be there


def _mapped(places: list[_Place], count: int) -> tuple[list[Tensor], str]:
    memories = []
    try:
        for process, descriptor, number in places:
            with open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_ino != number:
                    raise PermissionError(f"/proc/{process} is of another process")
                memories.append(torch.frombuffer(mmap.mmap(file.fileno(), count), dtype=torch.uint8))
    except (PermissionError, FileNotFoundError) as error:
        return [], f"processes of one user reach each other's memory, it does not ({error!r}); use c10d"
    except Exception as error:
        return [], f"it cannot map the memory of the others ({error!r}); use c10d"
    return memories, ""
