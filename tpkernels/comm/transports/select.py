"""Which transport moves the rows of an op, and the exchanges that each group has open.

TPKERNELS_TRANSPORT, read when this module is imported, says which:

    auto              on the CPU shared, where ranks are on one machine and torch computes, else c10d; on GPUs
                      the way that was timed fastest (the default)
    c10d              torch.distributed
    shared            memory of the CPU that processes of one machine share
    symmetric         torch's symmetric memory: GPUs of one machine that reach each other's memory
    symmetric-rounds  the same; calls are cut into a few rounds with a product each, as over c10d

`shared` and `symmetric` go over torch.distributed, too, where ranks of a group run on several machines:
between those.
Before the first transfer the ranks of a group agree on the transport, and under `auto` tell each other where
they run. What an explicit choice cannot serve is an error; only a tensor without elements, and an all-reduce
of rows that the ranks do not divide, go over c10d: sizes that all know. `auto` leaves to c10d what is small,
too (`schedule.worth_sharing`), and what no memory could be opened for, which a line of the log says.

An exchange is opened when a shape is first moved, which all ranks do together, and is kept for the next call.
A group keeps MOST_OPEN of them. Then an explicit choice closes the one that was used longest ago; `auto`
moves further shapes over c10d, so that lengths that change from batch to batch do not open one each time. All
ranks make the same calls in the same order, hence do the same. Exchanges end with the group, or the process.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import CannotTakePart, Claim, agree, offers_of_all
from tpkernels.comm.calls import calls_of, handshake, is_alive
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.schedule import even_chunks, parts_of_shard, pushed_chunks, worth_sharing
from tpkernels.comm.supported import Problem
from tpkernels.comm.transports import mailbox
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import c10d_for, rounds_for
from tpkernels.comm.transports.mailbox import Layout, MailboxExchange, Opening
from tpkernels.tp_invariance import mode

IN_ROUNDS = "symmetric-rounds"
TRANSPORTS = ("auto", "c10d", "shared", "symmetric", IN_ROUNDS)
MOST_OPEN = 16  # the ops of one layer need about six

# Read once: looking into the environment takes as long as a tenth of a tiny product.
requested_transport = os.environ.get("TPKERNELS_TRANSPORT", "auto")

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
    """What the ranks of a group agreed on, and the exchanges it has open, the one used last at the end."""

    def __init__(self, group: ProcessGroup, transport: str, against_sharing: str, machines: int) -> None:
        """machines: on which its ranks run; asked under `auto` only

        against_sharing: why `auto` shares no memory of the CPU; nothing if it does
        """
        self.transport, self._against_sharing, self.machines = transport, against_sharing, machines
        self.ranks = group.size()
        self.chosen: dict[tuple[object, ...], Exchange] = {}  # on GPUs, see `ways`
        self.dropped: dict[str, str] = {}  # ways that failed once, and why: not tried again
        self._group = ref(group)
        self._open: OrderedDict[Key, MailboxExchange] = OrderedDict()
        self._noted: set[Key] = set()

    def asked_for(self, op: str, key: Key, group: ProcessGroup) -> MailboxExchange:
        """Over the transport that was asked for."""
        if (found := self._open.get(key)) is None:
            if not self.has_room():
                self._close_oldest()
            found = self.open("symmetric" if self.transport == IN_ROUNDS else self.transport, op, key, group)
            self._note(key, self.transport, "asked for")
        self._open.move_to_end(key)
        return found

    def best(self, op: str, key: Key, group: ProcessGroup, *, to_all: bool) -> MailboxExchange | None:
        """Shared memory, or None for c10d, as `auto` chooses: from what all ranks share, hence all alike."""
        if found := self._open.get(key):
            return found
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
            return "it is small"
        if self._against_sharing:
            return self._against_sharing
        return "" if self.has_room() else f"{MOST_OPEN} shapes are open"

    def _close_oldest(self) -> None:
        """None that a graph writes, which replays when nobody sees it. All ranks capture the same."""
        oldest = next((key for key, exchange in self._open.items() if not exchange.captured), None)
        if oldest is not None:
            self._open.pop(oldest).close()

    def find(self, key: Key) -> MailboxExchange | None:
        return self._open.get(key)

    def most_calls(self) -> int:
        """The number of the last call of the open exchange that had the most."""
        return max((exchange.order.begun for exchange in self._open.values()), default=0)

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


def exchange_for(
    op: str,
    purpose: str,
    like: Tensor,
    rows: int,
    cols: int,
    group: ProcessGroup,
    features: int = 0,
    overlap: bool = True,
    *,
    to_all: bool = False,
    against_sharing: str = "",
) -> Exchange:
    """Return this rank's end of the exchange of a matrix of (rows, cols); each rank owns a shard of it.

    purpose: what else is in flight at the same time goes through another exchange
    like: a tensor of its dtype and device
    features: width of the product that hides the transfers; 0: there is none
    to_all: whether the sums of a reduce go to all ranks afterwards
    against_sharing: why this rank would rather share no memory of the CPU; asked at a group's first transfer
    """
    exchanges = exchanges_of(op, group, against_sharing)
    ranks, found = exchanges.ranks, None
    if exchanges.transport != "c10d" and rows and cols and not rows % ranks:
        if not is_alive(group):
            exchanges.close()
            raise RuntimeError(f"{op}: process group '{group.group_name}' was destroyed; make a new one")
        key = purpose, (rows // ranks, cols), like.dtype, like.device
        if exchanges.transport == "auto":
            found = exchanges.best(op, key, group, to_all=to_all)
        else:
            found = exchanges.asked_for(op, key, group)
            if exchanges.transport == IN_ROUNDS:
                return found.in_rounds(rounds_for(like, rows, features, ranks, overlap))
    return found or c10d_for(like, rows, features, ranks, overlap)


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
    asked = f"TPKERNELS_TRANSPORT={requested_transport}" + mode.described
    agree(Claim(f"{op} with {asked}", (), problem_of_request()), group)
    machines = 1
    if requested_transport == "auto":
        against_sharing, places = where_ranks_run(op, group, against_sharing, place())
        machines = len({*places})
        if not against_sharing and machines > 1:
            against_sharing = f"ranks are on {machines} machines"
    for left in list(_of_group.values()):
        if not left.is_alive():  # destroyed, and held by somebody
            left.close()
    exchanges = _of_group[id(group)] = Exchanges(group, requested_transport, against_sharing, machines)
    finalize(group, _forget, id(group))  # also at exit
    return exchanges


def where_ranks_run(op: str, group: ProcessGroup, against_sharing: str, here: str) -> tuple[str, list[str]]:
    """(why ranks share no memory of the CPU, wherever they are; where each is), the same on all ranks."""
    call = handshake(op, "where ranks run", group)
    found = offers_of_all(f"process group '{group.group_name}'", call, "", "", (here, against_sharing))
    problems = [f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(found) if theirs]
    try:
        if not calls_of(group).matches_tags(torch.device("cpu")):
            problems.append("its backend is not gloo")
    except RuntimeError:
        problems.append("it has no backend for the CPU")
    return problems[0] if problems else "", [where for where, _ in found]


def place() -> str:
    """A machine, and the network that it sees: processes in namespaces of their own stand for machines."""
    try:
        return f"{mailbox.machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return mailbox.machine()


def _forget(number: int) -> None:
    if exchanges := _of_group.pop(number, None):
        exchanges.close()
