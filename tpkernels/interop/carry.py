"""Moves blocks between the tensors of ranks.

    between                              a block
    a rank and itself                    is copied
    processes of one machine, on CPUs    is read by the receiver out of the sender's memory: one copy
    any others                           travels in a message of at most `bucket_bytes`, packed with others

Beyond its tensors a rank takes at most `buckets` x `bucket_bytes` of memory: for messages, for
addresses, and for blocks that are read into a buffer first, to be cast or transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import Call, all_or_fail, begin
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.comm.transports.peer_memory import Located, read
from tpkernels.interop.shards import Chunk
from tpkernels.topology.moves import Block, Message, Move, parts_of

Chunks = Mapping[str, Sequence[Chunk]]  # by the tensor's name
_WORTH_READING = 256  # contiguous bytes of the receiver's memory; shorter runs are read into a buffer
_BYTES_OF_A_RUN = 80  # for addresses on one side, and for computing them


@dataclass(frozen=True)
class Peer:
    """A rank of this machine whose tensors this rank can read."""

    process: int
    tensors: Mapping[str, Sequence[tuple[Block, Located]]]


def block_of(chunk: Chunk) -> Block:
    return tuple((index.start, index.stop) for index in chunk.where)


def part_of(chunks: Sequence[Chunk], block: Block) -> Tensor:
    """Return the view of a block that lies in one of the chunks."""
    for chunk in chunks:
        if (begins := _begins_in(block_of(chunk), block)) is not None:
            view = chunk.view
            for dim, (first, (begin, end)) in enumerate(zip(begins, block, strict=True)):
                if end - begin != view.shape[dim]:
                    view = view.narrow(dim, first, end - begin)
            return view
    raise AssertionError(f"no chunk has {block}")


def _begins_in(outer: Block, block: Block) -> list[int] | None:
    if all(low <= begin and end <= high for (low, high), (begin, end) in zip(outer, block, strict=True)):
        return [begin - low for (low, _), (begin, _) in zip(outer, block, strict=True)]
    return None


@torch.no_grad()
def copy_own(moves: Sequence[Move], sources: Chunks, targets: Chunks) -> None:
    """Copy the blocks that this rank holds itself."""
    for move in moves:
        source = part_of(sources[move.name], move.block)
        target = part_of(targets[move.name], move.block)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


class Reads(NamedTuple):
    """Blocks that one rank reads out of the memory of its peers, whose tensors have not moved."""

    moves: Sequence[Move]
    peers: Mapping[int, Peer]
    dtypes: Mapping[str, torch.dtype]  # of the sources


@torch.no_grad()
def read_from_peers(reads: Reads, targets: Chunks, most_bytes: int) -> None:
    """Read this rank's blocks out of the memory of its peers, by few system calls."""
    straight: list[tuple[int, Located, Located]] = []  # (process, there, here), found anew: targets may move
    for move in sorted(reads.moves, key=lambda move: move.sender):
        peer, dtype = reads.peers[move.sender], reads.dtypes[move.name]
        target = part_of(targets[move.name], move.block)
        there, here = _located(peer.tensors[move.name], move.block), Located.of(target)
        if target.dtype == dtype and here.run_bytes >= min(_WORTH_READING, move.size):
            straight.append((peer.process, there, here))
            continue
        # bytes an element: its share of the addresses of a run, and its place in a buffer
        of_item = 2 * _BYTES_OF_A_RUN * dtype.itemsize / min(there.run_bytes, move.size) + dtype.itemsize
        for block in parts_of(move.block, max(1, int(most_bytes / of_item))):
            into, source = part_of(targets[move.name], block), _located(peer.tensors[move.name], block)
            into.copy_(_as_read(peer.process, source, dtype, most_bytes))
    _read_pairs(straight, most_bytes)


def _read_pairs(pairs: Sequence[tuple[int, Located, Located]], most_bytes: int) -> None:
    """Read tensors of other processes, by few system calls. pairs: (process, there, here), by process"""
    for process, some in groupby(pairs, lambda pair: pair[0]):
        batch, taken = list[tuple[Tensor, Tensor]](), 0
        for _, there, here in some:
            for runs in _runs_of(there, here, most_bytes):
                size = sum(map(len, runs)) * _BYTES_OF_A_RUN
                if batch and taken + size > most_bytes:
                    read(process, *map(torch.cat, zip(*batch, strict=True)))
                    batch, taken = [], 0
                batch.append(runs)
                taken += size
        read(process, *map(torch.cat, zip(*batch, strict=True)))


def _as_read(process: int, source: Located, dtype: torch.dtype, most_bytes: int) -> Tensor:
    buffer = torch.empty(source.shape, dtype=dtype, device="cpu")
    _read_pairs([(process, source, Located.of(buffer))], most_bytes)
    return buffer


def _runs_of(there: Located, here: Located, most_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield runs of two tensors of one shape, at most as many at once as their addresses may take."""
    run = min(there.run_bytes, here.run_bytes)
    most = most_bytes * run // (2 * _BYTES_OF_A_RUN) // here.item_bytes
    for block in parts_of(tuple((0, size) for size in here.shape), max(1, most)):
        begins, shape = [begin for begin, _ in block], [end - begin for begin, end in block]
        yield there.part(begins, shape).runs(), here.part(begins, shape).runs()


def _located(tensors: Sequence[tuple[Block, Located]], block: Block) -> Located:
    for outer, located in tensors:
        if (begins := _begins_in(outer, block)) is not None:
            return located.part(begins, [end - begin for begin, end in block])
    raise AssertionError(f"the peer has no {block}")


@all_or_fail
@torch.no_grad()
def exchange(
    what: str,
    messages: Sequence[Message],
    buckets: int,
    group: ProcessGroup,
    sources: Chunks,
    targets: Chunks,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Send and receive messages, `buckets` at a time. Called by all ranks of the group.

    what: a description of the call, the same on all ranks
    messages: this rank's, from `topology.moves`
    dtypes: of the sources
    """
    call = begin("reshard", what, group)
    for first in range(0, len(messages), buckets):
        _exchange_some(call, messages[first : first + buckets], sources, targets, dtypes)


def _exchange_some(
    call: Call,
    messages: Sequence[Message],
    sources: Chunks,
    targets: Chunks,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    rank, device = call.group.rank(), exchange_device(call.group)
    outgoing = [message for message in messages if message.sender == rank]
    incoming = [message for message in messages if message.receiver == rank]
    sent, received = (
        [torch.empty(message.size, dtype=torch.uint8, device=device) for message in some]
        for some in (outgoing, incoming)
    )
    for message, packed in zip(outgoing, sent, strict=True):
        for move, slot in _slots(message, packed, dtypes):
            slot.copy_(part_of(sources[move.name], move.block))
    transfers = Transfers(call)
    works = transfers.exchange_all(
        [(message.receiver, packed) for message, packed in zip(outgoing, sent, strict=True)],
        [(message.sender, packed) for message, packed in zip(incoming, received, strict=True)],
    )
    for work, message, packed in zip(works, incoming, received, strict=True):
        transfers.await_rows(work, [message.sender])
        for move, slot in _slots(message, packed, dtypes):
            part_of(targets[move.name], move.block).copy_(slot)
    transfers.await_sends()


def _slots(message: Message, packed: Tensor, dtypes: Mapping[str, torch.dtype]) -> list[tuple[Move, Tensor]]:
    """Return the slot of each block in a message. Large items come first, so that each is aligned."""
    slots, offset = [], 0
    for move in sorted(message.moves, key=lambda move: -dtypes[move.name].itemsize):
        memory = packed[offset : offset + move.size].view(dtypes[move.name])
        slots.append((move, memory.view([end - begin for begin, end in move.block])))
        offset += move.size
    return slots
