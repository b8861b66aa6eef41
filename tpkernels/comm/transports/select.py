"""Which transport moves the rows of an op, and the exchanges that each group has open.

TPKERNELS_TRANSPORT, read when this module is imported, says which:

    auto              on the CPU shared, where ranks are on one machine and torch computes, else c10d; on GPUs
                      the way that was timed fastest (the default)
    c10d              torch.distributed
    shared            memory of the CPU that processes of one machine share
    symmetric         torch's symmetric memory: GPUs of one machine that reach each other's memory
    symmetric-rounds  the same; calls are cut into a few rounds with a product each, as over c10d

TPKERNELS_SAFE=1 means c10d, and refuses the others.

Before the first transfer the ranks of a group agree on the transport, and tell each other where they run: a
group on several machines goes over c10d. What an explicit choice cannot serve is an error; only a tensor
without elements, and an all-reduce of rows that the ranks do not divide, go over c10d: sizes that all know.
`auto` leaves to c10d what is small, too (`schedule.worth_sharing`), and what no memory could be opened for,
which a line of the log says.

An exchange is opened when a shape is first moved, which all ranks do together, and is kept for the next call.
A group keeps MOST_OPEN of them. Then an explicit choice closes the one whose last call is the longest ago;
`auto` moves further shapes over c10d, so that lengths that change from batch to batch do not open one each
time. All ranks make the same calls in the same order, hence do the same. Exchanges end with the group, or the
process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from weakref import finalize, ref

import torch
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import CannotTakePart, Claim, Problem, agree, offers_of_all
from tpkernels.comm.calls import calls_of, handshake, is_alive
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.schedule import even_chunks, parts_of_shard, pushed_chunks, worth_sharing
from tpkernels.comm.transports import processes
from tpkernels.comm.transports.mailbox import Layout, MailboxExchange, Opening
from tpkernels.comm.transports.rows import Transport
from tpkernels.env import env_or_safe
from tpkernels.tp_invariance import described

IN_ROUNDS = "symmetric-rounds"
TRANSPORTS = ("auto", "c10d", "shared", "symmetric", IN_ROUNDS)
MOST_OPEN = 16  # the ops of one layer need about six

# Read once: looking into the environment takes as long as a tenth of a tiny product.
requested_transport = env_or_safe("TPKERNELS_TRANSPORT", "auto", safe="c10d")

choices = logging.getLogger("tpkernels.choices")
warnings = logging.getLogger("tpkernels.comm")


def _open_shared(opening: Opening) -> MailboxExchange:
    from tpkernels.comm.transports.shared import open_shared  # here: a process opens one kind, or none

    return open_shared(opening)


def _open_symmetric(opening: Opening) -> MailboxExchange:
    from tpkernels.comm.transports.symmetric import open_symmetric

    return open_symmetric(opening)


openers: dict[str, Callable[[Opening], MailboxExchange]] = {
    "shared": _open_shared,
    "symmetric": _open_symmetric,
}

Key = tuple[str, tuple[int, int], torch.dtype, torch.device]  # purpose, shape of a shard


class Exchanges:
    """What the ranks of a group agreed on, and the exchanges it has open."""

    def __init__(self, group: ProcessGroup, transport: str, against_sharing: str, machines: int) -> None:
        """machines: on which its ranks run; asked under `auto` only

        against_sharing: why `auto` shares no memory of the CPU; nothing if it does
        """
        self.transport, self._against_sharing, self.machines = transport, against_sharing, machines
        self.ranks = group.size()
        self.chosen: dict[tuple[object, ...], Transport] = {}  # on GPUs, see `ways`
        self.dropped: dict[str, str] = {}  # ways that failed once, and why: not tried again
        self._group = ref(group)
        self._open: dict[Key, MailboxExchange] = {}
        calls_of(group).memory = self._open.values()
        self._noted: set[Key] = set()

    @property
    def in_rounds(self) -> bool:
        return self.transport == IN_ROUNDS

    def exchange_for(self, op: str, key: Key, group: ProcessGroup, *, to_all: bool) -> MailboxExchange | None:
        """Return this rank's end of the exchange for shards of a matrix, or None for c10d.

        to_all: the sums of a reduce go to all ranks afterwards
        """
        if self.transport == "c10d":
            return None
        if found := self._open.get(key):
            return found
        if self.transport == "auto":
            return self._best(op, key, group, to_all=to_all)
        if not self.has_room():
            self._close_oldest()
        found = self.open("symmetric" if self.transport == IN_ROUNDS else self.transport, op, key, group)
        self._note(key, self.transport, "asked for")
        return found

    def _best(self, op: str, key: Key, group: ProcessGroup, *, to_all: bool) -> MailboxExchange | None:
        """Shared memory, or None for c10d, as `auto` chooses: from what all ranks share, hence all alike."""
        if why := self._against(key, group.size(), to_all):
            self._note(key, "c10d", why)
            return None
        try:
            opened = self.open("shared", op, key, group)
        except CannotTakePart as error:  # on all ranks alike
            self._against_sharing = str(error)
            if group.rank() == 0:
                warnings.warning("%s; what has no shared memory yet goes over c10d", error)
            return None
        self._note(key, "shared", "all ranks are on one machine")
        return opened

    def _against(self, key: Key, ranks: int, to_all: bool) -> str:
        """Why a shape does not move through shared memory; nothing if it does."""
        _, (rows, cols), dtype, device = key
        if device.type != "cpu":
            return f"its memory is on {device.type}"
        if not worth_sharing(rows * cols * dtype.itemsize, ranks, to_all=to_all):
            return "it is small for shared memory"
        if self._against_sharing:
            return self._against_sharing
        return "" if self.has_room() else f"{MOST_OPEN} shapes are open"

    def why_over_c10d(self, key: Key, *, to_all: bool) -> str:
        """Say why rows of this shape do not move through memory that ranks share."""
        if self.transport == "c10d":
            asked = f"TPKERNELS_TRANSPORT={requested_transport}"
            return asked if self.machines == 1 else f"{asked}, and ranks on {self.machines} machines"
        _, (rows, cols), _, device = key
        if not (rows and cols):
            return "it has no elements"
        if device.type == "cuda" and self.transport == "auto":
            if self.machines > 1:
                return f"ranks are on {self.machines} machines"
            timed = any(moved[1:4] == (key[0], rows * self.ranks, cols) for moved in self.chosen)
            return "other ways were timed slower" if timed else "other ways were not timed"
        return self._against(key, self.ranks, to_all)

    def _close_oldest(self) -> None:
        """The one whose last call is the longest ago.

        None that a graph writes, which replays when nobody sees it. All ranks capture the same.
        """
        closable = [key for key, exchange in self._open.items() if not exchange.captured]
        if closable:
            oldest = min(closable, key=lambda key: self._open[key].last_call)
            self._open.pop(oldest).close()
            if group := self._group():
                calls_of(group).kinds.clear()  # some move through it

    def find(self, key: Key) -> MailboxExchange | None:
        return self._open.get(key)

    def has_room(self) -> bool:
        return len(self._open) < MOST_OPEN

    def open(self, transport: str, op: str, key: Key, group: ProcessGroup) -> MailboxExchange:
        """All ranks of the group do this at once."""
        purpose, shape, dtype, device = key
        shard_bytes = shape[0] * shape[1] * dtype.itemsize
        if transport == "symmetric":
            splits = pushed_chunks(shape[0], shard_bytes, group.size())
        else:
            splits = even_chunks(shape[0], parts_of_shard(shard_bytes))
        name = f"the {purpose} of process group '{group.group_name}'"
        layout = Layout(group.size(), shape, dtype, splits)
        opening = Opening(name, group, layout, device, timeout_of(group, device), op=op)
        with torch.inference_mode(False):  # its memory outlives a region that may be active now
            self._open[key] = exchange = openers[transport](opening)
        return exchange

    def _note(self, key: Key, transport: str, why: str) -> None:
        if choices.isEnabledFor(logging.INFO) and key not in self._noted and (group := self._group()):
            self._noted.add(key)
            purpose, (rows, cols), dtype, _ = key
            choices.info(
                "%s of %d x %d %s a rank, process group '%s' of %d ranks: %s (%s)",
                purpose, rows, cols, str(dtype).removeprefix("torch."), group.group_name, group.size(),
                transport, why,
            )  # fmt: skip

    def is_alive(self) -> bool:
        return (group := self._group()) is not None and is_alive(group)

    def close_one(self, key: Key) -> None:
        if exchange := self._open.pop(key, None):
            exchange.close()

    def close(self) -> None:
        self.chosen.clear()
        while self._open:
            self._open.popitem()[1].close()


_of_group: dict[int, Exchanges] = {}  # by id, as in `calls`; a group takes its own with it


def problem_of_request() -> Problem | None:
    """Why TPKERNELS_TRANSPORT says nothing, if so."""
    if requested_transport in TRANSPORTS:
        return None
    return (
        "ValueError",
        f"TPKERNELS_TRANSPORT is {requested_transport!r}; expected one of {', '.join(TRANSPORTS)}",
    )


def exchanges_of(op: str, group: ProcessGroup, against_sharing: str) -> Exchanges:
    """What the group's ranks have agreed on; now, if they have not."""
    return _of_group.get(id(group)) or _agreed(op, group, against_sharing)


def _agreed(op: str, group: ProcessGroup, against_sharing: str) -> Exchanges:
    """What all ranks of the group ask for, or the same error on all of them."""
    asked = f"TPKERNELS_TRANSPORT={requested_transport}" + described()
    agree(Claim(f"{op} with {asked}", (), problem_of_request()), group)
    machines, transport = 1, requested_transport
    if transport != "c10d":
        against_sharing, places = where_ranks_run(op, group, against_sharing, place())
        machines = len({*places})
        if machines > 1:
            against_sharing = against_sharing or f"ranks are on {machines} machines"
            transport = "auto" if transport == "auto" else "c10d"
        elif calls_of(group).nccl_backends():  # where no message says how far a rank has come
            from tpkernels.comm.transports.shared import share_pages

            share_pages(op, group)
    for left in list(_of_group.values()):
        if not left.is_alive():  # destroyed, and held by somebody
            left.close()
    exchanges = Exchanges(group, transport, against_sharing, machines)
    finalize(group, _forget, id(group))  # also at exit; before it is known, as of Ctrl-C
    _of_group[id(group)] = exchanges
    return exchanges


def where_ranks_run(op: str, group: ProcessGroup, against_sharing: str, here: str) -> tuple[str, list[str]]:
    """(why ranks share no memory of the CPU, wherever they are; where each is), the same on all ranks."""
    call = handshake(op, "where ranks run", group)
    found = offers_of_all(f"process group '{group.group_name}'", call, "", "", (here, against_sharing))
    problems = [f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(found) if theirs]
    try:
        if not calls_of(group).has_tags(torch.device("cpu")):
            problems.append("its backend is not gloo")
    except RuntimeError:
        problems.append("it has no backend for the CPU")
    return problems[0] if problems else "", [where for where, _ in found]


def place() -> str:
    """A machine, and the network that it sees: processes in namespaces of their own stand for machines."""
    try:
        return f"{processes.machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return processes.machine()


def _forget(number: int) -> None:
    if exchanges := _of_group.pop(number, None):
        exchanges.close()
