"""The `shared` transport: ranks that are processes of one machine exchange through memory they all map.

The memory has no name, so that nothing is left behind however a rank ends: each rank makes an anonymous file,
the others open it by way of its process, and the system frees it with the last of them. So each knows the
processes of the others, and notices when one ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import CannotTakePart, Closable, built_by_all, offers_here
from tpkernels.comm.calls import PAGE_BYTES
from tpkernels.comm.transports.host import HostExchange, pusher_of
from tpkernels.comm.transports.mailbox import Layout, Meeting, Opening
from tpkernels.comm.transports.processes import process_of

B = TypeVar("B", bound=Closable)


def open_shared(opening: Opening) -> HostExchange:
    """Open this rank's end of an exchange; all ranks of the group call this together."""
    return open_mapped(opening, partial(_exchange_in, opening))


def _exchange_in(opening: Opening, shared: Mapping[int, Mapped]) -> HostExchange:
    rank, layout = opening.group.rank(), opening.layout
    assert len(shared) == layout.ranks, "ranks of one machine"
    mailboxes = [layout.mailbox(shared[peer].memory) for peer in range(layout.ranks)]
    processes = {peer: process_of(mapped.process) for peer, mapped in shared.items() if peer != rank}
    pusher = pusher_of(opening.group)
    return HostExchange(opening.name, rank, layout, mailboxes, opening.timeout, processes, pusher)


class Mapped(NamedTuple):
    """A rank on this machine, and its process."""

    buffer: mmap.mmap  # zeroed, and shared by it
    process: int

    @property
    def memory(self) -> Tensor:
        return torch.frombuffer(self.buffer, dtype=torch.uint8)


class _Unused:
    """Memory that comes with pages of calls."""

    def close(self) -> None:
        """Do nothing: nobody holds it."""


def share_pages(op: str, group: ProcessGroup) -> None:
    """Let ranks of one machine read each other's pages of calls, if all can; all of the group call this."""
    layout = Layout(group.size(), (1, 1), torch.uint8)
    opening = Opening(f"pages of calls of process group '{group.group_name}'", group, layout, op=op)
    with suppress(CannotTakePart):
        open_mapped(opening, lambda shared: _Unused())


def open_mapped(opening: Opening, build: Callable[[Mapping[int, Mapped]], B]) -> B:
    """Build objects from the memory of this machine's ranks: return them by rank in the group."""
    name, layout, problem, descriptor = opening.name, opening.layout, "", -1
    try:
        if opening.device.type != "cpu":
            raise ValueError(
                "TPKERNELS_TRANSPORT=shared exchanges memory of the CPU, got "
                f"{opening.device}; use symmetric or c10d"
            )
        layout.require_rows(name)
        descriptor = new_memory(name, layout.byte_count)
    except Exception as error:  # whatever it is, the others wait to be told
        problem = f"{type(error).__name__}: {error}"
    try:
        return mapped_by_all(opening, str(layout), layout.byte_count, problem, descriptor, build)
    finally:
        if descriptor >= 0:  # all have mapped it
            os.close(descriptor)


def new_memory(name: str, count: int) -> int:
    """The descriptor of an anonymous file of zeros."""
    descriptor = os.memfd_create(f"tpkernels {name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, count)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped_by_all(
    meeting: Meeting,
    wanted: str,
    count: int,
    problem: str,
    descriptor: int,
    build: Callable[[Mapping[int, Mapped]], B],
) -> B:
    """Build objects from the first bytes of this machine's ranks: return them by rank.

    wanted: what all must want alike
    problem: why this rank brings nothing, if so: then all raise
    """
    call, found, page = meeting.begin(), dict[int, mmap.mmap](), -1
    pages = call.calls.pages
    try:
        if not (problem or pages):  # nor have the other ranks
            page = new_memory("calls", PAGE_BYTES)
    except Exception as error:  # whatever it is, the others wait to be told
        problem = f"{type(error).__name__}: {error}"
    offer = " ".join(map(str, (os.getpid(), *_found_by(descriptor), *_found_by(page))))

    def map_and_build() -> B:
        if not pages:
            for peer, at in places.items():
                found[peer] = _mapped(at.process, at.page, at.page_number, PAGE_BYTES)
        return build(
            {
                peer: Mapped(_mapped(at.process, at.descriptor, at.number, count), at.process)
                for peer, at in places.items()
            }
        )

    try:
        # a rank that cannot go on says so here: nobody waits for it below
        here, offers = offers_here(meeting.title, call, problem, wanted, offer)
        places = {peer: _Place(*map(int, offers[peer].split())) for peer in here}
        built = built_by_all(meeting.title, call, map_and_build)
    finally:
        if page >= 0:
            os.close(page)
    pages.update(found)
    if found:
        call.calls.write_header(call.kind, call.number)
    return built


class _Place(NamedTuple):
    """Where a rank's memory is found, and its page of calls."""

    process: int
    descriptor: int
    number: int  # of the file
    page: int
    page_number: int


def _found_by(descriptor: int) -> tuple[int, int]:
    """Return how other processes find a file: where /proc is of others, another may have its descriptor."""
    return descriptor, os.fstat(descriptor).st_ino if descriptor >= 0 else 0


def _mapped(process: int, descriptor: int, number: int, count: int) -> mmap.mmap:
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != number:
                raise PermissionError(f"/proc/{process} is of another process")
            return mmap.mmap(file.fileno(), count)
    except (PermissionError, FileNotFoundError) as error:
        raise RuntimeError(
            f"processes of one user reach each other's memory, it does not ({error!r}); use c10d"
        ) from error
    except Exception as error:
        raise RuntimeError(f"it cannot map the memory of the others ({error!r}); use c10d") from error
