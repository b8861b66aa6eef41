"""Rows in flight between the ranks of a group: gathered, or reduced. No autograd, no kernels.

    gathering = Gathering(call, shard, rows)        reducing = Reducing(call, partial_of, rows, cols, like)
    for rows, part in gathering.arrivals():         ... more work ...
        ... part = full[rows] is there ...
    full = gathering.wait()                         total = reducing.wait()

Transfers are point to point, as `schedule` plans them: each is on its way as soon as it is started, and what
is computed meanwhile hides it. On NCCL they run on the backend's own stream and `wait` holds up the current
stream only; on gloo its thread moves them, and `wait` blocks.

Sums are taken here and not by the backend: in fp32 (or wider) and in the order of ranks, so that they depend
neither on who came first nor on how the backend adds. gloo adds bfloat16 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import (
    bounds,
    gather_swaps,
    parts_of_shard,
    peers_by_step,
    reduce_swaps,
    swaps_whole_parts,
)
from tpkernels.comm.transports.transfers import Transfers

PartialOf = Callable[[slice], Tensor]


class Pending(Protocol):
    """A result in flight."""

    def wait(self) -> Tensor:
        """The result, once it is there."""


class Gathering:
    """Shards of all ranks on their way into one matrix."""

    def __init__(self, call: Call, shard: Tensor, rows: int) -> None:
        """shard: (this rank's rows, cols), as `schedule.bounds` divides `rows` over the ranks"""
        ranks, rank = call.calls.ranks, call.calls.rank
        first, last = bounds(rows, ranks, rank)
        assert len(shard) == last - first, "the caller divides rows as the plan does"
        shard = shard.contiguous()
        self._full = shard.new_empty(rows, shard.shape[1])
        self._own = slice(first, last)
        self._transfers = Transfers(call)
        self._arriving: list[tuple[slice, int, Work | None]] = []
        parts = parts_of_shard(-(-rows // ranks) * shard.shape[1] * shard.element_size())
        for swap in gather_swaps(rows, ranks, rank, parts):
            outgoing = shard[swap.sent.start - first : swap.sent.stop - first]
            arriving = self._full[swap.received.rows]
            received = self._transfers.exchange(swap.to, outgoing, swap.source, arriving)
            self._arriving.append((swap.received.rows, swap.source, received))
        self._full[self._own].copy_(shard)

    def arrivals(self) -> Iterator[tuple[slice, Tensor]]:
        """Row ranges and their rows, each as soon as it is there: own rows first, then as planned."""
        yield self._own, self._full[self._own]
        for rows, source, received in self._arriving:
            self._transfers.await_rows(received, source)
            yield rows, self._full[rows]
        self._arriving.clear()
        self._transfers.await_sends()

    def wait(self) -> Tensor:
        """All rows."""
        for _ in self.arrivals():
            pass
        return self._full


def sum_of_slots(slots: Tensor, bias: Tensor | None) -> Tensor:
    """slots: (ranks, rows, cols), two or more; in fp32 or wider, in the order of ranks, rounded once."""
    wide = slots.dtype
    if wide.is_floating_point:
        wide = torch.promote_types(wide, torch.float32)
    total = slots[0].to(wide) + slots[1]
    for slot in slots[2:]:
        total += slot
    if bias is not None:
        total += bias
    return total.to(slots.dtype)


class Reducing:
    """Partial sums of all ranks on their way to the owners of the rows: a reduce-scatter."""

    def __init__(
        self,
        call: Call,
        partial_of: PartialOf,
        rows: int,
        cols: int,
        like: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Compute and send, others' rows first.

        partial_of: this rank's part of the sums of some rows
        like: a tensor of the dtype and device of partial sums
        bias: (cols,), added once
        """
        ranks, rank = call.calls.ranks, call.calls.rank
        first, last = bounds(rows, ranks, rank)
        self._bias = bias
        self._slots = like.new_empty(ranks, last - first, cols)
        self._transfers = Transfers(call)
        self._arriving: list[tuple[int, Work | None]] = []
        parts = parts_of_shard(-(-rows // ranks) * cols * like.element_size())
        for swap in reduce_swaps(rows, ranks, rank, parts):
            slot = self._slots[swap.source, swap.received.start - first : swap.received.stop - first]
            partial = partial_of(swap.sent.rows).contiguous()
            received = self._transfers.exchange(swap.to, partial, swap.source, slot)
            self._arriving.append((swap.source, received))
        self._slots[rank].copy_(partial_of(slice(first, last)))

    def wait(self) -> Tensor:
        """The sums of this rank's rows, over ranks in their order, plus bias; rounded once."""
        for source, received in self._arriving:
            self._transfers.await_rows(received, source)
        self._arriving.clear()
        self._transfers.await_sends()
        return sum_of_slots(self._slots, self._bias)


def all_reducing(
    call: Call,
    partial_of: PartialOf,
    rows: int,
    cols: int,
    like: Tensor,
    bias: Tensor | None = None,
) -> Pending:
    """Partial sums of all ranks on their way to all of them, a chunk of rows after the other.

    Arguments as of `Reducing`. Sizes alone choose the way, and both end with the same bits on all ranks.
    """
    ranks, row_bytes = call.calls.ranks, cols * like.element_size()
    chunks = parts_of_shard(-(-rows // ranks) * row_bytes)
    chunk_rows = [slice(*bounds(rows, chunks, chunk)) for chunk in range(chunks)]
    if swaps_whole_parts(rows * row_bytes, ranks):
        return Swapping(call, partial_of, chunk_rows, bias)
    return AllReducing(call, partial_of, chunk_rows, cols, like, bias)


class Swapping:
    """What each rank has of the sums goes to all others, and all take the same sums."""

    def __init__(
        self,
        call: Call,
        partial_of: PartialOf,
        chunk_rows: Sequence[slice],
        bias: Tensor | None,
    ) -> None:
        ranks, rank = call.calls.ranks, call.calls.rank
        self._bias = bias
        self._transfers = Transfers(call)
        self._chunks: list[Tensor] = []
        self._arriving: list[tuple[int, Work | None]] = []
        for rows in chunk_rows:
            partial = partial_of(rows).contiguous()
            slots = partial.new_empty(ranks, *partial.shape)
            for to, source in peers_by_step(ranks, rank):
                received = self._transfers.exchange(to, partial, source, slots[source])
                self._arriving.append((source, received))
            slots[rank].copy_(partial)
            self._chunks.append(slots)

    def wait(self) -> Tensor:
        """The sums of all rows, plus bias."""
        for source, received in self._arriving:
            self._transfers.await_rows(received, source)
        self._arriving.clear()
        self._transfers.await_sends()
        sums = [sum_of_slots(slots, self._bias) for slots in self._chunks]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


class AllReducing:
    """A chunk is reduced while the next one is computed, and gathered while the one after that is."""

    def __init__(
        self,
        call: Call,
        partial_of: PartialOf,
        chunk_rows: Sequence[slice],
        cols: int,
        like: Tensor,
        bias: Tensor | None,
    ) -> None:
        self._call = call
        self._gathering: list[Gathering] = []
        self._reducing: tuple[int, Reducing] | None = None
        for rows in chunk_rows:
            partial = partial_of(rows)
            reducing = Reducing(call, partial.__getitem__, len(partial), cols, like, bias)
            self._gather_reduced()
            self._reducing = len(partial), reducing

    def wait(self) -> Tensor:
        """The sums of all rows, plus bias."""
        self._gather_reduced()
        parts = [gathering.wait() for gathering in self._gathering]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather_reduced(self) -> None:
        if self._reducing is not None:
            rows, reducing = self._reducing
            self._gathering.append(Gathering(self._call, reducing.wait(), rows))
            self._reducing = None
