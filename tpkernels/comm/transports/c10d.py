"""The `c10d` transport: rows travel over torch.distributed.

    C10D           on the CPU: a shard is cut into chunks, each a message with the tag of its call
    Collectives    on GPUs: one launch a round, of which a call has few

    a round of     is
    a gather       one all_gather_into_tensor if it is the only round; else sends and receives, coalesced
    a reduce       one all_to_all_single, into slots that are summed here

What moves is on its way as soon as it is started, and what is computed meanwhile hides it. NCCL runs it on a
stream of its own, and waiting holds up the current stream only; gloo's thread moves it, and waiting blocks.
All ranks start the same in one order: nobody waits for somebody who waits for it.

gloo's own collectives bear no tag, and a message of another length than was expected aborts the process. So
with gloo all goes point to point, in whole shards where nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import Work

from tpkernels.comm.calls import Call
from tpkernels.comm.carveout import IN_FLIGHT
from tpkernels.comm.groups import (
    Start,
    refuse_other_devices,
    start_all_gather,
    start_all_to_all,
    start_together,
)
from tpkernels.comm.schedule import (
    Plan,
    Round,
    Swap,
    collective_gather_plan,
    collective_reduce_plan,
    collective_rounds,
    parts_of_shard,
)
from tpkernels.comm.transports.base import Delivery, Exchange, blaming

Message = tuple[int, Tensor]  # the other rank, and what it gets or sends


class Transfers:
    """The sends and receives of one call, with errors that name the rank at fault."""

    def __init__(self, call: Call, *, awaited_by_products: bool = True) -> None:
        """awaited_by_products: the stream that computes waits; else `occupy_no_more` says when it does"""
        self._call, self._awaited_by_products = call, awaited_by_products
        self._sends: list[tuple[Work, list[int], Tensor]] = []  # buffers live until they are sent
        self._awaited: dict[int, Work] = {}  # by id: one launch may be of several messages
        self._in_flight: dict[int, Work] = {}  # likewise, of those that occupy processors

    def exchange(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> Work | None:
        """Send and receive in one launch, as NCCL needs; empty messages are left out.

        returns: to wait for before `incoming` is read; None if it is empty
        """
        received = self.exchange_all([(to, outgoing)], [(source, incoming)])
        return received[0] if received else None

    def exchange_all(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> list[Work]:
        """Send and receive several messages, in one launch where the backend supports it.

        returns: to wait for before what is received is read, of each that is not empty; often one for all
        """
        outgoing = [(to, rows) for to, rows in outgoing if rows.numel()]
        incoming = [(source, rows) for source, rows in incoming if rows.numel()]
        if not outgoing and not incoming:
            return []
        tag = self._call.tag
        # gloo tells a peer what it may send over the socket that it sends rows on. Said behind these rows,
        # the peer's begin when they have gone, and a swap takes twice as long.
        starts = [_receiving(rows, source, tag) for source, rows in incoming]
        starts += [_sending(rows, to, tag) for to, rows in outgoing]
        device = (outgoing or incoming)[0][1].device
        try:
            works = start_together(self._call.group, device, starts)
        except RuntimeError as error:
            peers = {peer for peer, _ in (*outgoing, *incoming)}
            raise self._unreachable(sorted(peers), device, error) from error
        self._occupies(works, device)
        if len(works) < len(starts):
            works *= len(starts)  # one launch, hence one to wait for
        received, sent = works[: len(incoming)], works[len(incoming) :]
        self._sends += [(work, [to], rows) for work, (to, rows) in zip(sent, outgoing, strict=True)]
        return received

    def collective(
        self, start: Callable[..., Work], peers: list[int], outgoing: Tensor, *arguments: object
    ) -> Work:
        """Start a collective of all ranks by `start(group, *arguments)`.

        peers: those this rank gets rows from; returns: to wait for before these are read
        """
        try:
            work = start(self._call.group, *arguments)
        except RuntimeError as error:
            raise self._unreachable(peers, outgoing.device, error) from error
        self._occupies([work], outgoing.device)
        self._sends.append((work, peers, outgoing))
        return work

    def await_rows(self, received: Work, sources: Sequence[int]) -> None:
        self._await(received, sources, "rows of rank {} did not arrive")

    def await_sends(self) -> None:
        """Wait until all sends are done and their tensors may be overwritten."""
        for work, peers, _ in self._sends:
            if id(work) not in self._awaited:
                self._await(work, peers, "rank {} did not take its rows")
        self._sends.clear()
        self._awaited.clear()

    def _await(self, work: Work, peers: Sequence[int], problem: str) -> None:
        if id(work) in self._awaited:
            return
        try:
            self._call.wait_for(work.wait)
        except RuntimeError as error:
            raise self._failure(problem.format(_any(peers)), error) from error
        finally:
            if self._awaited_by_products and id(work) in self._in_flight:
                del self._in_flight[id(work)]
                if not self._in_flight:
                    IN_FLIGHT.end(self._call.group)
        self._awaited[id(work)] = work

    def occupy_no_more(self) -> None:
        """Give processors back: later products come after all transfers that were started."""
        if self._in_flight:
            self._in_flight.clear()
            IN_FLIGHT.end(self._call.group)

    def _occupies(self, works: Sequence[Work], device: torch.device) -> None:
        """These are in flight: on a GPU products leave processors to them."""
        if not _processors(device):
            return
        if not self._in_flight:  # collectives of a group follow each other: one claim serves all of a call
            IN_FLIGHT.begin(self._call.group, device)
        for work in works:
            self._in_flight[id(work)] = work

    def __del__(self) -> None:
        """After an error nobody waits for what is left."""
        self.occupy_no_more()

    def _unreachable(self, peers: Sequence[int], device: torch.device, error: RuntimeError) -> RuntimeError:
        refuse_other_devices(self._call.op, self._call.group, device)
        return self._failure(f"rank {_any(peers)} cannot be reached", error)

    def _failure(self, what: str, error: RuntimeError) -> RuntimeError:
        calls = self._call.calls
        cause = calls.first_failure() or error
        return blaming(self._call.op, what, f"process group '{calls.name}'", calls.rank, calls.ranks, cause)


def _sending(rows: Tensor, to: int, tag: int) -> Start:
    return lambda group: group.send([rows], to, tag)


def _receiving(rows: Tensor, source: int, tag: int) -> Start:
    return lambda group: group.recv([rows], source, tag)


def _any(ranks: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(ranks)))


class C10dExchange(Exchange):
    """Moves chunks point to point; one object serves all groups and shapes."""

    tapered = host_waits = True

    def chunks(self, shard_bytes: int) -> int:
        return parts_of_shard(shard_bytes)

    def begin(self, call: Call, plan: Plan, cols: int, like: Tensor) -> Delivery:
        return _C10dDelivery(call, plan, _memory(plan, cols, like))


class Collectives(C10dExchange):
    """Moves each round by one collective; one object serves all groups and shapes."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        # from what may differ between ranks: sizes of weight shards, and GPUs
        self.note = f" in {rounds} rounds" if rounds > 1 else ""

    def plan_gather(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        return collective_gather_plan(rows, ranks, rank, self.rounds)

    def plan_reduce(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        return collective_reduce_plan(rows, ranks, rank, self.rounds)

    def begin(self, call: Call, plan: Plan, cols: int, like: Tensor) -> Delivery:
        return _CollectiveDelivery(call, plan, _memory(plan, cols, like))


def _memory(plan: Plan, cols: int, like: Tensor) -> Tensor:
    return torch.empty((plan.rows, cols), dtype=like.dtype, device=like.device)


C10D = C10dExchange()
collectives_of = lru_cache(Collectives)  # by rounds


def c10d_for(like: Tensor, rows: int, features: int, ranks: int, overlap: bool) -> Exchange:
    """Return the c10d exchange for a matrix of that many rows.

    like: a tensor of its device
    features: width of the product that hides the transfers; 0: there is none, or it is computed at once
    """
    return (
        collectives_of(rounds_for(like, rows, features, ranks, overlap)) if _processors(like.device) else C10D
    )


def rounds_for(like: Tensor, rows: int, features: int, ranks: int, overlap: bool) -> int:
    """Return into how many rounds arithmetic cuts a call; arguments as of `c10d_for`."""
    processors = _processors(like.device) or 1
    return collective_rounds(rows, features, ranks, processors) if overlap else 1


@lru_cache
def _processors(device: torch.device) -> int:
    """Of a GPU; else 0."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


class _C10dDelivery(Delivery):
    lasts = True

    def __init__(self, call: Call, plan: Plan, memory: Tensor) -> None:
        self.plan, self.memory = plan, memory
        self._transfers = Transfers(call)
        self._arriving: dict[int, tuple[Work, list[int]]] = {}  # by the first row of a chunk

    def swap(self, swap: Swap, outgoing: Tensor) -> None:
        incoming = self.memory[swap.received]
        received = self._transfers.exchange(swap.to, outgoing, swap.source, incoming)
        if received is not None:
            self._arriving[swap.received.start] = received, [swap.source]

    def keep(self, rows: Tensor) -> None:
        self.memory[self.plan.kept].copy_(rows)

    def await_rows(self, rows: slice) -> None:
        for start in [start for start in self._arriving if rows.start <= start < rows.stop]:
            self._transfers.await_rows(*self._arriving.pop(start))

    def end(self) -> None:
        self._transfers.await_sends()


class _CollectiveDelivery(_C10dDelivery):
    """A collective writes the rows that a round receives, which lie one after the other.

    It also brings this rank's own rows, where these are among what was moved.
    """

    def move(self, round: Round, outgoing: Tensor, first_row: int) -> None:
        plan, memory = self.plan, self.memory
        if plan.reduces:
            self._reduce(round, outgoing)
        elif not (round.swaps and plan.rows and memory.shape[1]):
            return  # the same on all ranks, whose own rows may be none
        elif len(plan.rounds) == 1 and plan.rows % plan.ranks == 0:
            self.has_own = True
            sources = [swap.source for swap in round.swaps]
            self._arriving[0] = (
                self._transfers.collective(start_all_gather, sources, outgoing, memory, outgoing),
                sources,
            )
        else:
            self._sends_and_receives(round.swaps, outgoing)

    def _reduce(self, round: Round, outgoing: Tensor) -> None:
        moved, memory = round.all_to_all, self.memory
        if moved is None or not memory.shape[1]:  # the same on all ranks
            return
        assert outgoing.shape[0] == round.rows.stop - round.rows.start, (
            "a collective moves all rows of a round"
        )
        self.has_own |= moved.has_own
        into = memory[moved.into] if len(self.plan.rounds) > 1 else memory
        work = self._transfers.collective(
            start_all_to_all, moved.sources, outgoing, into, outgoing, moved.received, moved.sent
        )
        self._arriving[moved.into.start] = work, moved.sources

    def _sends_and_receives(self, swaps: Sequence[Swap], shard: Tensor) -> None:
        """In one launch where the backend can: a lone send of NCCL takes another communicator."""
        wanted = [(swap.source, self.memory[swap.received]) for swap in swaps]
        works = self._transfers.exchange_all([(swap.to, shard) for swap in swaps], wanted)
        arriving = [swap for swap in swaps if swap.received.start < swap.received.stop]
        for swap, work in zip(arriving, works, strict=True):
            self._arriving[swap.received.start] = work, [swap.source]
