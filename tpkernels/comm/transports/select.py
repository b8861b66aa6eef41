"""Which transport moves the rows of an op, and the exchanges that each group has open.

TPKERNELS_TRANSPORT, read when this module is imported, says which:

    auto        c10d (the default): the others have not been timed on a GPU
    c10d        point to point over torch.distributed
    shared      memory of the CPU that processes of one machine share
    symmetric   torch's symmetric memory: GPUs of one machine that reach each other's memory

The last two go point to point, too, where ranks of a group run on several machines: between those.
The ranks of a group agree on it before the first transfer. What it cannot serve is an error; only a tensor
without elements, and an all-reduce of rows that the ranks do not divide, go over c10d: sizes that all know.

An exchange is opened when a shape is first moved, which all ranks do together, and is kept for the next call.
A group keeps MOST_OPEN of them, and closes the one that was used longest ago; all ranks make the same calls
in the same order, hence close the same. They end with the group, or with the process.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, cast
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.calls import is_alive
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.schedule import even_chunks, parts_of_shard, pushed_chunks
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import c10d_for
from tpkernels.comm.transports.mailbox import Layout, MailboxExchange, Opening
from tpkernels.comm.transports.shared import open_shared
from tpkernels.comm.transports.symmetric import open_symmetric

Transport = Literal["c10d", "shared", "symmetric"]
TRANSPORTS = ("auto", "c10d", "shared", "symmetric")
MOST_OPEN = 16  # the ops of one layer need about six

# Read once: looking into the environment takes as long as a tenth of a tiny product.
requested_transport = os.environ.get("TPKERNELS_TRANSPORT", "auto")


openers: dict[str, Callable[[Opening], MailboxExchange]] = {
    "shared": open_shared,
    "symmetric": open_symmetric,
}

Key = tuple[str, tuple[int, int], torch.dtype, torch.device]


class _Exchanges:
    """Those that one group has open, the one used last at the end."""

    def __init__(self, transport: Transport, group: ProcessGroup) -> None:
        self.transport, self._group = transport, ref(group)
        self._open: OrderedDict[Key, MailboxExchange] = OrderedDict()

    def get(self, op: str, key: Key, group: ProcessGroup) -> MailboxExchange:
        if key not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._close_oldest()
            purpose, shape, dtype, device = key
            shard_bytes = shape[0] * shape[1] * dtype.itemsize
            if self.transport == "symmetric":
                splits = pushed_chunks(shape[0], shard_bytes, group.size())
            else:
                splits = even_chunks(shape[0], parts_of_shard(shard_bytes))
            name = f"the {purpose} of process group '{group.group_name}'"
            layout = Layout(group.size(), shape, dtype, splits)
            opening = Opening(name, group, layout, device, timeout_of(group, device), op)
            with torch.inference_mode(False):  # its memory outlives a region that may be active now
                self._open[key] = openers[self.transport](opening)
        self._open.move_to_end(key)
        return self._open[key]

    def _close_oldest(self) -> None:
        """None that a graph writes, which replays when nobody sees it. All ranks capture the same."""
        oldest = next((key for key, exchange in self._open.items() if not exchange.captured), None)
        if oldest is not None:
            self._open.pop(oldest).close()

    def is_alive(self) -> bool:
        return (group := self._group()) is not None and is_alive(group)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


_of_group: dict[int, _Exchanges] = {}  # by id, as in `calls`; a group takes its own with it


def exchange_for(
    op: str,
    purpose: str,
    like: Tensor,
    rows: int,
    cols: int,
    group: ProcessGroup,
    features: int = 0,
    overlap: bool = True,
) -> Exchange:
    """Our end of the exchange of a matrix of (rows, cols), of which each rank owns a shard.

    purpose: what else is in flight at the same time goes through another exchange
    like: a tensor of its dtype and device
    features: width of the product that hides the transfers; 0: there is none
    """
    exchanges = _of_group.get(id(group)) or _agreed(op, group)
    if exchanges.transport == "c10d" or not (rows and cols) or rows % (ranks := group.size()):
        return c10d_for(like, rows, features, group.size(), overlap)
    if not is_alive(group):
        exchanges.close()
        raise RuntimeError(f"{op}: process group '{group.group_name}' was destroyed; make a new one")
    return exchanges.get(op, (purpose, (rows // ranks, cols), like.dtype, like.device), group)


def _agreed(op: str, group: ProcessGroup) -> _Exchanges:
    """What all ranks of the group ask for, or the same error on all of them."""
    chosen = "c10d" if requested_transport == "auto" else requested_transport
    problem = None
    if chosen not in TRANSPORTS:
        problem = "ValueError", f"TPKERNELS_TRANSPORT is {chosen!r}; expected one of {', '.join(TRANSPORTS)}"
    agree(Claim(f"{op} with TPKERNELS_TRANSPORT={chosen}", (), problem), group)
    for left in list(_of_group.values()):
        if not left.is_alive():  # destroyed, and held by somebody
            left.close()
    exchanges = _of_group[id(group)] = _Exchanges(cast("Transport", chosen), group)
    finalize(group, _forget, id(group))  # also at exit
    return exchanges


def _forget(number: int) -> None:
    _of_group.pop(number).close()
