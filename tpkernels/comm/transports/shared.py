"""The `shared` transport: ranks that are processes of one machine exchange through memory they all map.

The memory has no name, so that nothing is left behind however a rank ends: each rank makes an anonymous file,
the others open it by way of its process, and the system frees it with the last of them. So each knows the
processes of the others, and notices when one ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.mailbox import MailboxExchange, Opening
from tpkernels.comm.transports.memory import Mailbox
from tpkernels.comm.transports.processes import process_of

E = TypeVar("E", bound=MailboxExchange)


def open_shared(opening: Opening) -> HostExchange:
    """Our end of an exchange; all ranks of the group call this at once."""
    return open_mapped(opening, partial(_exchange_in, opening))


def _exchange_in(opening: Opening, shared: Mapping[int, Mapped]) -> HostExchange:
    rank, layout = opening.group.rank(), opening.layout
    mailboxes: list[Mailbox | None] = [None] * layout.ranks
    for peer, (memory, _) in shared.items():
        mailboxes[peer] = layout.mailbox(memory)
    processes = {peer: process_of(number) for peer, (_, number) in shared.items() if peer != rank}
    return HostExchange(opening.name, rank, layout, mailboxes, opening.timeout, processes)


class Mapped(NamedTuple):
    """A rank on this machine."""

    memory: Tensor  # zeroed bytes for its mailbox
    process: int


def open_mapped(opening: Opening, build: Callable[[Mapping[int, Mapped]], E]) -> E:
    """What `build` makes of the memory of the ranks on this machine, by their number in the group."""
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
        places = {peer: _Place(*map(int, offers[peer].split())) for peer in here}

        def map_and_build() -> E:
            return build({peer: _mapped(place, layout.byte_count) for peer, place in places.items()})

        return opening.built_by_all(call, map_and_build)  # all have mapped it, so descriptors may close
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Place(NamedTuple):
    """Where a rank's memory is found."""

    process: int
    descriptor: int
    number: int  # of the file: where /proc is of other processes, another may be there


def _mapped(place: _Place, count: int) -> Mapped:
    try:
        with open(f"/proc/{place.process}/fd/{place.descriptor}", "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != place.number:
                raise PermissionError(f"/proc/{place.process} is of another process")
            mapped = mmap.mmap(file.fileno(), count)
    except (PermissionError, FileNotFoundError) as error:
        raise RuntimeError(
            f"processes of one user reach each other's memory, it does not ({error!r}); use c10d"
        ) from error
    except Exception as error:
        raise RuntimeError(f"it cannot map the memory of the others ({error!r}); use c10d") from error
    return Mapped(torch.frombuffer(mapped, dtype=torch.uint8), place.process)
