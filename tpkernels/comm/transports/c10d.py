"""The `c10d` transports: rows travel over torch.distributed.

    Message        gloo, few rows: they travel in the message that announces the call, one to each peer
    PointToPoint   gloo, many rows: chunks with the tag of their call, which products hide
    Collectives    other backends: one launch a round, of which a call has few

    a round of     is
    a gather       one all_gather_into_tensor if it is the only round; else sends and receives, coalesced
    a reduce       one all_to_all_single, into slots that are summed here

NCCL runs a collective on a stream of its own, and waiting holds up the current stream only. gloo's own
collectives bear no tag, and a message of another length than was expected aborts the process: so with gloo
all goes from rank to rank, after headers that say what comes. All ranks start the same in one order: nobody
waits for somebody who waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import gcd
from operator import methodcaller

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from tpkernels.comm.calls import Call
from tpkernels.comm.carveout import IN_FLIGHT
from tpkernels.comm.groups import (
    refuse_other_devices,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
    start_together,
)
from tpkernels.comm.schedule import (
    Round,
    collective_gather_plan,
    collective_reduce_plan,
    collective_rounds,
    count_of,
    gather_plan,
    reduce_plan,
)
from tpkernels.comm.transports.rows import Gather, Kernels, Reduce, Terms, Until, add_up
from tpkernels.errors import cause_of

_WIDE_ROW = 1024  # a kernel adds wide rows best


class Message:
    """Rows travel with the header."""

    note, way = "", "with the header"

    def gather(self, call: Call, shard: Tensor, rows: int, *, keeps: bool, at_once: bool) -> Gather:
        call.announce(shard)
        full = shard.new_empty(rows, shard.shape[1])
        return Gather(full, [(slice(0, rows), partial(_place, call, shard, full))], call.end)

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        shards = terms.at_once().contiguous().chunk(call.calls.ranks)
        call.announce(by_peer=list(shards))
        return Reduce(terms, (), partial(_sum, call, shards, bias, tree=terms.tree), call.end)


MESSAGE = Message()


def _place(call: Call, shard: Tensor, full: Tensor) -> None:
    """Wait for all rows, and put them in the order of ranks."""
    slots = [shard] * call.calls.ranks
    _receive(call, slots)
    torch.cat(slots, out=full)


def _receive(call: Call, slots: list[Tensor]) -> None:
    """Wait for the rows of other ranks, which have the shape of ours."""
    own = slots[0]
    count, dtype, shape = own.nbytes, own.dtype, own.shape
    for peer, message in zip(call.calls.peers, call.confirm(), strict=True):
        slots[peer] = message[:count].view(dtype).view(shape)


def _sum(call: Call, shards: Sequence[Tensor], bias: Tensor | None, *, tree: bool) -> Tensor:
    slots = [shards[call.calls.rank]] * len(shards)
    _receive(call, slots)
    return add_up(slots, bias, tree=tree)


class PointToPoint:
    """Rows travel in chunks; a receive is posted for each before the first product."""

    note = ""

    def __init__(self, chunks: int) -> None:
        """chunks: of a shard"""
        self.chunks, self.way = chunks, f"{count_of(chunks, 'chunk')} from rank to rank"

    def gather(self, call: Call, shard: Tensor, rows: int, *, keeps: bool, at_once: bool) -> Gather:
        calls = call.calls
        plan = gather_plan(rows, calls.ranks, calls.rank, 1 if at_once else self.chunks)
        call.announce()
        full, own = shard.new_empty(rows, shard.shape[1]), plan.own
        waits: list[Until | None] = [None]
        for round in plan.rounds[1:]:
            (swap,) = round.swaps
            # gloo tells a peer what it may send over the socket that it sends rows on. Said behind these
            # rows, the peer's begin when they have gone, and a swap takes twice as long.
            waits.append(_receive_chunk(call, full[swap.received], swap.source))
            _send_chunk(call, shard[swap.sent.start - own.start : swap.sent.stop - own.start], swap.to)
        full[own].copy_(shard)
        if len(waits) > 1:
            waits[1] = partial(_after_headers, call, waits[1])
        else:
            waits[0] = call.confirm
        arriving = [(round.rows, wait) for round, wait in zip(plan.rounds, waits, strict=True)]
        return Gather(full, arriving, call.end, at_once=at_once)

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        calls, like = call.calls, terms.like
        plan = reduce_plan(terms.rows, calls.ranks, calls.rank, 1 if at_once else self.chunks)
        call.announce()
        computed = terms.at_once().__getitem__ if at_once else terms.compute
        slots = like.new_empty(plan.rows, terms.cols)
        waits: list[Until] = [call.confirm]
        for round in plan.rounds[:-1]:
            (swap,) = round.swaps
            chunk = computed(round.rows).contiguous()
            if (wait := _receive_chunk(call, slots[swap.received], swap.source)) is not None:
                waits.append(wait)
            _send_chunk(call, chunk, swap.to)
        slots[plan.kept].copy_(computed(plan.own))
        slots = slots.view(calls.ranks, plan.rows // calls.ranks, terms.cols)
        return Reduce(terms, waits, lambda: add_up(slots, bias, tree=terms.tree), call.end)


def _after_headers(call: Call, wait: Until | None) -> None:
    call.confirm()
    if wait is not None:
        wait()


def _receive_chunk(call: Call, rows: Tensor, source: int) -> Until | None:
    """None for an empty chunk, which nobody sends."""
    return call.receive(rows, source) if rows.numel() else None


def _send_chunk(call: Call, rows: Tensor, to: int) -> None:
    if rows.numel():
        call.send(rows, to)


class Collectives:
    """Moves each round by one collective, which writes the rows that it receives one after the other."""

    def __init__(self, rounds: int, kernels: Kernels | None = None) -> None:
        """kernels: add the slots, where they compute"""
        self.rounds, self._kernels = rounds, kernels
        # from what may differ between ranks: sizes of weight shards, and GPUs
        self.note = f" in {rounds} rounds" if rounds > 1 else ""
        self.way = count_of(rounds, "collective")

    def gather(self, call: Call, shard: Tensor, rows: int, *, keeps: bool, at_once: bool) -> Gather:
        ranks = call.calls.ranks
        plan = collective_gather_plan(rows, ranks, call.calls.rank, self.rounds)
        full, own, launches = shard.new_empty(rows, shard.shape[1]), plan.own, Launches(call, shard.device)
        if not full.numel():  # the same on all ranks, whose own rows may be none
            return Gather(full)
        if len(plan.rounds) == 1 and rows % ranks == 0:
            wait = launches.start(call.calls.peers, start_all_gather, full, shard)
            return Gather(full, [(slice(0, rows), wait)], launches.end, at_once=at_once, add=self._sum)
        arriving = []
        for round in plan.rounds:
            wanted = [(swap.source, full[swap.received]) for swap in round.swaps]
            arriving.append(
                (round.rows, launches.exchange([(swap.to, shard) for swap in round.swaps], wanted))
            )
        full[own].copy_(shard)
        return Gather(full, arriving, launches.end, at_once=at_once, add=self._sum)

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        calls, like = call.calls, terms.like
        plan = collective_reduce_plan(terms.rows, calls.ranks, calls.rank, self.rounds)
        computed = terms.at_once().__getitem__ if at_once else terms.compute
        slots, launches = like.new_empty(plan.rows, terms.cols), Launches(call, like.device)
        waits: list[Until] = []
        own_moved = False
        for round in plan.rounds:
            chunk, moved = computed(round.rows).contiguous(), round.all_to_all
            if moved is not None and terms.cols:  # the same on all ranks
                own_moved |= moved.has_own
                into = slots[moved.into] if len(plan.rounds) > 1 else slots
                waits.append(
                    launches.start(moved.sources, start_all_to_all, into, chunk, moved.received, moved.sent)
                )
        if not own_moved:  # the last round has them
            slots[plan.kept].copy_(_own_rows(round, chunk, plan.own))
        slots = slots.view(calls.ranks, plan.rows // calls.ranks, terms.cols)
        return Reduce(terms, waits, partial(self._sum, slots, bias, terms), launches.end)

    def _sum(self, slots: Tensor, bias: Tensor | None, terms: Terms) -> Tensor:
        tree, after = terms.tree, terms.after
        if self._kernels is None:
            return add_up(slots, bias, tree=tree)
        ranks, rows, cols = slots.shape
        if bias is None and after is None and cols % _WIDE_ROW:
            # any rows will do, and a region's may have one column
            wide = slots.view(ranks, -1, gcd(rows * cols, _WIDE_ROW))
            return self._kernels.sum_of(wide, None, None, tree=tree).view(rows, cols)
        return self._kernels.sum_of(slots, bias, None, tree=tree, after=after)


def _own_rows(round: Round, chunk: Tensor, own: slice) -> Tensor:
    return chunk[own.start - round.rows.start : own.stop - round.rows.start]


class BackendSums(Collectives):
    """The backend takes the sums: off by default, see TPKERNELS_BACKEND_SUMS.

    No slots are written and read. The backend adds in an order of its own, and may round in between; the bias
    is added to the rounded sum. So bits depend on how ranks are connected and on the backend's version.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.note, self.way = " by the backend", "the backend's sum"

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        own, ranks = terms.at_once().contiguous(), call.calls.ranks
        total = own.new_empty(terms.rows // ranks, terms.cols)
        return self._started(call, terms, bias, total, start_reduce_scatter, total, own)

    def all_reduce(self, call: Call, terms: Terms, bias: Tensor | None) -> Reduce:
        """Start an all-reduce."""
        own = terms.at_once().clone(memory_format=torch.contiguous_format)
        return self._started(call, terms, bias, own, start_all_reduce, own)

    def _started(
        self,
        call: Call,
        terms: Terms,
        bias: Tensor | None,
        total: Tensor,
        start: Callable[..., Work],
        *tensors: Tensor,
    ) -> Reduce:
        launches = Launches(call, terms.like.device)
        if terms.rows and terms.cols:
            launches.start(call.calls.peers, start, *tensors, ReduceOp.SUM, None)
        launches_end = launches.end

        def add() -> Tensor:
            launches_end()
            return total if bias is None else total + bias

        return Reduce(terms, (), add, _nothing)


def _nothing() -> None: ...


collectives_of = lru_cache(Collectives)  # by rounds and kernels


def rounds_for(like: Tensor, rows: int, width: int, ranks: int) -> int:
    """Return into how many rounds arithmetic cuts a call. width: of the product that hides it, or 0"""
    return collective_rounds(rows, width, ranks, processors_of(like.device) or 1)


@lru_cache
def processors_of(device: torch.device) -> int:
    """The SMs of a GPU; else 0."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


Launched = tuple[int, Tensor]  # the other rank, and what it gets or sends


class Launches:
    """The collectives of one call; on a GPU products leave SMs to them while they are in flight."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        # tensors live until they are sent; None: was awaited
        self._works: list[tuple[Work, Sequence[int], object] | None] = []
        self._occupies = False

    def start(self, peers: Sequence[int], start: Callable[..., Work], *arguments: object) -> Until:
        """Start a collective by `start(group, *arguments)`; returns the function that waits for it.

        peers: those this rank gets rows from
        """
        self._occupy()
        try:
            work = start(self._call.group, *arguments)
        except RuntimeError as error:
            raise self._unreachable(peers, error) from error
        self._works.append((work, peers, arguments))
        return partial(self._wait, len(self._works) - 1)

    def exchange(self, outgoing: Sequence[Launched], incoming: Sequence[Launched]) -> Until:
        """Send and receive several messages, in one launch where the backend supports it.

        A lone send of NCCL takes another communicator, so that one alone is launched so, too.
        """
        outgoing = [(to, rows) for to, rows in outgoing if rows.numel()]
        incoming = [(source, rows) for source, rows in incoming if rows.numel()]
        if not outgoing and not incoming:
            return _nothing
        self._occupy()
        tag = self._call.tag
        starts = [methodcaller("recv", [rows], source, tag) for source, rows in incoming]
        starts += [methodcaller("send", [rows], to, tag) for to, rows in outgoing]
        peers = sorted({peer for peer, _ in (*outgoing, *incoming)})
        first = len(self._works)
        try:
            works = start_together(self._call.group, self._device, starts)
        except RuntimeError as error:
            raise self._unreachable(peers, error) from error
        self._works += [(work, peers, (outgoing, incoming)) for work in works]
        # sends that are apart from receives are awaited at the end
        return partial(self._wait_all, range(first, first + min(len(works), max(1, len(incoming)))))

    def end(self) -> None:
        """Wait until all is sent, so that its memory may change; the stream that computes waits, on a GPU."""
        self._wait_all(range(len(self._works)))
        self._works.clear()
        self._give_back()

    def _wait_all(self, works: range) -> None:
        for number in works:
            self._wait(number)

    def _wait(self, number: int) -> None:
        if (launched := self._works[number]) is None:
            return
        self._works[number] = None
        work, peers, _ = launched
        try:
            work.wait()
        except RuntimeError as error:
            raise self._call.blaming(_any(peers), "rows of rank {} did not arrive", error) from error
        if number == len(self._works) - 1:  # collectives of a group follow each other
            self._give_back()

    def _occupy(self) -> None:
        """One claim serves all collectives of a call, which follow each other."""
        if not self._occupies and processors_of(self._device):
            IN_FLIGHT.begin(self._call.group, self._device)
            self._occupies = True

    def _give_back(self) -> None:
        if self._occupies:
            self._occupies = False
            IN_FLIGHT.end(self._call.group)

    def __del__(self) -> None:
        """After an error nobody waits for what is left."""
        self._give_back()

    def _unreachable(self, peers: Sequence[int], error: RuntimeError) -> RuntimeError:
        refuse_other_devices(self._call.op, self._call.group, self._device)
        return self._call.blaming(_any(peers), "rank {} cannot be reached", error)


def _any(ranks: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(ranks)))


def gather_small(call: Call, part: Tensor) -> Tensor:
    """Gather small tensors of one shape from all ranks: return (ranks, *shape of part)."""
    calls = call.calls
    row = part.reshape(1, -1)
    try:
        transport: Message | PointToPoint | Collectives = collectives_of(1)
        if calls.has_tags(part.device):
            transport = MESSAGE if part.nbytes <= calls.eager_bytes else PointToPoint(1)
        full = transport.gather(call, row, calls.ranks, keeps=True, at_once=True).all()
    except BaseException as error:  # Ctrl-C, too: the others do not know
        calls.fail(f"{type(error).__name__}: {cause_of(error)}")
        raise
    return full.view(calls.ranks, *part.shape)
