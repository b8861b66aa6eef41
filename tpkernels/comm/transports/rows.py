"""Rows in flight between the ranks of a group: gathered, or reduced. No autograd, no kernels.

    gathering = Gathering(call, shard, rows)        reducing = Reducing(call, partial_of, rows, cols, like)
    for rows, chunk in gathering.arrivals():        ... more work ...
        ... chunk = full[rows] is there ...
    full = gathering.wait()                         total = reducing.wait()

`schedule` plans what travels when, and any transport moves it: point to point unless an exchange is given.
Without overlap it moves in as few messages as it can.

Sums are taken here and not by a backend: in fp32 (or wider) and in the order of ranks, so that they depend
neither on who came first nor on how the backend adds. gloo adds bfloat16 in bfloat16. For TP-invariance the
order is a tree, see `tp_invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.groups import start_all_gather
from tpkernels.comm.schedule import bounds, parts_of_shard, swaps_full_sums
from tpkernels.comm.transports.base import Delivery, Exchange
from tpkernels.comm.transports.c10d import C10D, Collectives
from tpkernels.errors import cause_of
from tpkernels.tp_invariance import mode, tree_sum

PartialOf = Callable[[slice], Tensor]


class Pending(Protocol):
    """A result in flight."""

    def wait(self) -> Tensor:
        """Wait for the result, and return it."""


class Waits(Protocol):
    """How chunks are awaited: by the host, or by kernels."""

    def rows(self, delivery: Delivery, rows: slice) -> Tensor:
        """Return rows of a delivery's memory, which are valid until it ends."""

    def all_rows(self, delivery: Delivery) -> Tensor:
        """Return all gathered rows; no later call overwrites them."""

    def total(self, delivery: Delivery, bias: Tensor | None) -> Tensor:
        """Return (rows, cols): the sum of the slots in the order of ranks, plus the bias once."""

    def pushed(self, delivery: Delivery, partial_of: PartialOf) -> bool:
        """Whether a kernel now computes all partial sums and stores them in their owners' slots."""


class HostWaits:
    """The host blocks until chunks have arrived."""

    def rows(self, delivery: Delivery, rows: slice) -> Tensor:
        delivery.await_rows(rows)
        return delivery.memory[rows]

    def all_rows(self, delivery: Delivery) -> Tensor:
        delivery.await_rows(slice(0, delivery.plan.rows))
        return delivery.memory if delivery.lasts else delivery.memory.clone()

    def total(self, delivery: Delivery, bias: Tensor | None) -> Tensor:
        delivery.await_rows(slice(0, delivery.plan.rows))
        return sum_of_slots(delivery.slots, bias)

    def pushed(self, delivery: Delivery, partial_of: PartialOf) -> bool:
        return False


HOST_WAITS = HostWaits()


def sum_of_slots(slots: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of two or more slots (ranks, rows, cols) in the order of ranks, rounded once."""
    wide = slots.dtype
    if wide.is_floating_point:
        wide = torch.promote_types(wide, torch.float32)
    if mode.segments:
        total = tree_sum(slots.to(wide).unbind())
    else:
        total = slots[0].to(wide) + slots[1]
        for slot in slots[2:]:
            total += slot
    if bias is not None:
        total += bias
    return total.to(slots.dtype)


class Gathering:
    """An all-gather in flight: the shards of all ranks move into one matrix."""

    def __init__(
        self,
        call: Call,
        shard: Tensor,
        rows: int,
        exchange: Exchange = C10D,
        waits: Waits = HOST_WAITS,
        overlap: bool = True,
    ) -> None:
        """shard: (this rank's rows, cols), as `schedule.bounds` divides `rows` over the ranks"""
        shard, calls, (size, cols) = shard.contiguous(), call.calls, shard.shape
        shard_bytes = -(-rows // calls.ranks) * cols * shard.element_size()
        plan = exchange.plan_gather(rows, calls.ranks, calls.rank, shard_bytes, overlap)
        first = plan.own.start
        assert size == plan.own.stop - first, "the caller divides rows as the plan does"
        self._waits = waits
        self._full: Tensor | None = None
        self._keep = True
        self.delivery = delivery = exchange.begin(call, plan, cols, shard)
        for round in plan.rounds:
            if round.swaps:
                delivery.move(round, shard, first)
        if not delivery.has_own:
            delivery.keep(shard)

    def arrivals(self, *, keep: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """Yield row ranges and their rows as they arrive: own rows first, then as planned.

        keep: `wait` is called later, and rows stay; else they are there until the next are asked for
        """
        delivery, self._keep = self.delivery, keep
        full = delivery.memory if delivery.lasts or not keep else torch.empty_like(delivery.memory)
        for round in delivery.plan.rounds:
            arrived = self._waits.rows(delivery, round.rows)
            if full is not delivery.memory:
                arrived = full[round.rows].copy_(arrived)
            yield round.rows, arrived
        self._full = full
        delivery.end()

    def wait(self) -> Tensor:
        """Wait for all rows, and return them."""
        assert self._keep, "rows that nobody waits for are not kept"
        if (full := self._full) is None:
            full = self._full = self._waits.all_rows(self.delivery)
            self.delivery.end()
        return full

    def total(self, bias: Tensor | None) -> Tensor:
        """Return the sum of the shards in the order of ranks, plus bias; all have equal numbers of rows."""
        return _total(self.delivery, self._waits, bias)


class Reducing:
    """A reduce-scatter in flight: partial sums of all ranks move to the owners of the rows."""

    def __init__(
        self,
        call: Call,
        partial_of: PartialOf,
        rows: int,
        cols: int,
        like: Tensor,
        bias: Tensor | None = None,
        exchange: Exchange = C10D,
        waits: Waits = HOST_WAITS,
        overlap: bool = True,
    ) -> None:
        """Compute partial sums and send them, other ranks' rows first.

        partial_of: this rank's term of the sums of some rows
        like: a tensor of the dtype and device of partial sums
        bias: (cols,), added once
        """
        calls = call.calls
        shard_bytes = -(-rows // calls.ranks) * cols * like.element_size()
        plan = exchange.plan_reduce(rows, calls.ranks, calls.rank, shard_bytes, overlap)
        self._bias, self._waits = bias, waits
        self.delivery = delivery = exchange.begin(call, plan, cols, like)
        if waits.pushed(delivery, partial_of):
            return
        for round in plan.rounds:
            partial, first = partial_of(round.rows).contiguous(), round.rows.start
            delivery.move(round, partial, first)
        if not delivery.has_own:
            delivery.keep(partial[plan.own.start - first : plan.own.stop - first])  # the last round has them

    def wait(self) -> Tensor:
        """Return the sums of this rank's rows in the order of ranks, plus bias, rounded once."""
        return _total(self.delivery, self._waits, self._bias)


def _total(delivery: Delivery, waits: Waits, bias: Tensor | None) -> Tensor:
    total = waits.total(delivery, bias)
    delivery.end()
    return total


def all_reducing(
    call: Call,
    partial_of: PartialOf,
    rows: int,
    cols: int,
    like: Tensor,
    bias: Tensor | None = None,
    reduces: Exchange = C10D,
    gathers: Exchange = C10D,
    waits: Waits = HOST_WAITS,
    overlap: bool = True,
) -> Pending:
    """An all-reduce in flight: partial sums of all ranks move to all of them.

    Arguments as of `Reducing`. Sizes alone choose the way, and all end with the same bits on all ranks. Point
    to point, chunks of tokens are reduced and gathered one after the other. Collectives cut a reduce into
    rounds instead; where it has several, half of what travels hides behind the product.
    """
    ranks, row_bytes = call.calls.ranks, cols * like.element_size()
    swapping = reduces is C10D or (isinstance(reduces, Collectives) and reduces.rounds == 1)
    swapping = swapping and swaps_full_sums(rows * row_bytes, ranks)
    if reduces is not C10D and not swapping:
        return AllReducing(call, [(partial_of, rows)], cols, like, bias, reduces, gathers, waits, overlap)
    chunks = parts_of_shard(-(-rows // ranks) * row_bytes) if overlap and reduces is C10D else 1
    chunk_rows = [slice(*bounds(rows, chunks, chunk)) for chunk in range(chunks)]
    if swapping:
        return Swapping(call, map(partial_of, chunk_rows), bias, gathers, waits)
    partials = ((partial_of(chunk).__getitem__, chunk.stop - chunk.start) for chunk in chunk_rows)
    return AllReducing(call, partials, cols, like, bias, overlap=overlap)


class Swapping:
    """An all-reduce in one step: each rank sends its partial sums to all others, and all add them."""

    def __init__(
        self,
        call: Call,
        partials: Iterable[Tensor],
        bias: Tensor | None,
        gathers: Exchange = C10D,
        waits: Waits = HOST_WAITS,
    ) -> None:
        """partials: of chunks of rows, each computed when the one before is on its way"""
        self._bias, ranks = bias, call.calls.ranks
        self._chunks = [
            Gathering(call, each, ranks * each.shape[0], gathers, waits, overlap=False) for each in partials
        ]

    def wait(self) -> Tensor:
        """The sums of all rows, plus bias."""
        sums = [chunk.total(self._bias) for chunk in self._chunks]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


class AllReducing:
    """An all-reduce in chunks: one chunk is gathered and one reduced while the next is computed."""

    def __init__(
        self,
        call: Call,
        partials: Iterable[tuple[PartialOf, int]],
        cols: int,
        like: Tensor,
        bias: Tensor | None,
        reduces: Exchange = C10D,
        gathers: Exchange = C10D,
        waits: Waits = HOST_WAITS,
        overlap: bool = True,
    ) -> None:
        """partials: of chunks of rows, with how many rows each has; the others as of `Reducing`"""
        self._call, self._gathers, self._waits, self._overlap = call, gathers, waits, overlap
        self._gathering: list[Gathering] = []
        self._reducing: tuple[int, Reducing] | None = None
        for partial_of, rows in partials:
            reducing = Reducing(call, partial_of, rows, cols, like, bias, reduces, waits, overlap)
            self._gather_reduced()
            self._reducing = rows, reducing

    def wait(self) -> Tensor:
        """The sums of all rows, plus bias."""
        self._gather_reduced()
        chunks = [gathering.wait() for gathering in self._gathering]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _gather_reduced(self) -> None:
        if self._reducing is not None:
            rows, reducing = self._reducing
            gathering = Gathering(
                self._call, reducing.wait(), rows, self._gathers, self._waits, self._overlap
            )
            self._gathering.append(gathering)
            self._reducing = None


def gather_small(call: Call, part: Tensor) -> Tensor:
    """Gather small tensors of one shape from all ranks: return (ranks, *shape of part).

    In one collective, but where tags can keep a rank in another call from being taken for one in this: gloo
    aborts a process that gets a message of another length than it expects.
    """
    calls = call.calls
    try:
        if calls.matches_tags(part.device):
            return Gathering(call, part.reshape(1, -1), calls.ranks).wait().view(calls.ranks, *part.shape)
        return _gathered_at_once(call, part)
    except BaseException as error:  # Ctrl-C, too: the others do not know
        calls.fail(f"{type(error).__name__}: {cause_of(error)}")
        raise


def _gathered_at_once(call: Call, part: Tensor) -> Tensor:
    calls = call.calls
    gathered = part.new_empty(calls.ranks, *part.shape)
    if not gathered.numel():
        return gathered
    try:
        call.wait_for(start_all_gather(call.group, gathered.view(-1), part.reshape(-1)).wait)
    except RuntimeError as error:
        raise RuntimeError(
            f"{call.op}: rank {calls.rank} of {calls.ranks} in process group '{calls.name}' did not get what "
            "the others know of their parts: one died, came too late, or left the common order of calls. "
            f"Cause: {calls.first_failure() or cause_of(error)}"
        ) from error
    return gathered
