"""Which rank sends which block of a tensor to which rank, when ranks hold blocks of it and need others.

A block is a range of indices in each dimension of the full tensor, as (begin, end). Of what a rank needs, it
copies what it holds itself. Every other element is sent to it once, by a rank that holds it: one of its own
machine if there is one, and of several the one with least to send so far.

>>> rows = [(((0, 4), (0, 2)),), (((4, 8), (0, 2)),)]  # two ranks that hold half of the rows each
>>> columns = [(((0, 8), (0, 1)),), (((0, 8), (1, 2)),)]
>>> for move in moves_of([Placement("w", 2, rows, columns)], machines=[0, 0]):
...     print(move.sender, move.receiver, move.block, move.size)
0 0 ((0, 4), (0, 1)) 8
1 0 ((4, 8), (0, 1)) 8
1 1 ((4, 8), (1, 2)) 8
0 1 ((0, 4), (1, 2)) 8

What ranks send is packed into messages of at most `bucket_bytes`, and messages into rounds in which each rank
has a few of them: sends and receives of all ranks are the same list, so nobody waits for somebody who waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

Block = tuple[tuple[int, int], ...]
Blocks = tuple[Block, ...]  # that one rank holds, or needs, of a tensor
Holders = tuple[int, ...]  # ranks


class Placement(NamedTuple):
    """Where the elements of one tensor are, and where they shall be.

    item_bytes: of an element
    held, wanted: by rank; the blocks of one rank do not overlap
    """

    name: str
    item_bytes: int
    held: Sequence[Blocks]
    wanted: Sequence[Blocks]


class Move(NamedTuple):
    """A block that goes from one rank to another, or is copied, if they are the same."""

    name: str
    sender: int
    receiver: int
    block: Block
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Message:
    """Blocks that travel together from one rank to another."""

    sender: int
    receiver: int
    moves: tuple[Move, ...]

    @property
    def size(self) -> int:
        return sum(move.size for move in self.moves)


def elements(block: Block) -> int:
    """How many a block has; 1 if the tensor has no dimension."""
    return prod(end - begin for begin, end in block)


def common(a: Block, b: Block) -> Block | None:
    """What two blocks share, if anything."""
    found = []
    for (a_begin, a_end), (b_begin, b_end) in zip(a, b, strict=True):
        begin, end = max(a_begin, b_begin), min(a_end, b_end)
        if begin >= end:
            return None
        found.append((begin, end))
    return tuple(found)


def without(block: Block, cut: Block) -> Iterator[Block]:
    """The rest of a block as blocks that do not overlap. cut: lies in the block"""
    for dim, ((begin, end), (low, high)) in enumerate(zip(block, cut, strict=True)):
        for rest in ((begin, low), (high, end)):
            if rest[0] < rest[1]:
                yield (*cut[:dim], rest, *block[dim + 1 :])


def parts_of(block: Block, most: int) -> Iterator[Block]:
    """The block in parts of at most so many elements, in the order of its elements."""
    if elements(block) <= most:
        yield block
        return
    dim = next(dim for dim, (begin, end) in enumerate(block) if end - begin > 1)
    begin, end = block[dim]
    each = max(1, most // prod(high - low for low, high in block[dim + 1 :]))
    for first in range(begin, end, each):
        yield from parts_of((*block[:dim], (first, min(first + each, end)), *block[dim + 1 :]), most)


def moves_of(placements: Iterable[Placement], machines: Sequence[Hashable]) -> list[Move]:
    """All moves, the same list on every rank.

    machines: on which each rank is
    """
    senders = _Senders(machines)
    cells: dict[tuple[tuple[Blocks, ...], tuple[Blocks, ...]], list[_Cells]] = {}
    moves = []
    for name, item_bytes, held, wanted in placements:
        key = tuple(held), tuple(wanted)
        if key not in cells:  # layers of a model are alike
            cells[key] = _cells_of(name, *key)
        for receiver, found in enumerate(cells[key]):
            for block, holders in found:
                size = elements(block) * item_bytes
                sender = receiver if holders is None else senders.choose(holders, receiver, size)
                moves.append(Move(name, sender, receiver, block, size))
    return moves


def messages_of(moves: Iterable[Move], bucket_bytes: int) -> list[Message]:
    """What is sent, packed: a block that is larger than a bucket is cut."""
    packed: dict[tuple[int, int], list[list[Move]]] = {}
    room: dict[tuple[int, int], int] = {}  # in the last message of a pair of ranks
    for move in moves:
        if move.sender == move.receiver:
            continue
        pair = move.sender, move.receiver
        item_bytes = move.size // elements(move.block)
        for block in parts_of(move.block, max(1, bucket_bytes // item_bytes)):
            part = move._replace(block=block, size=elements(block) * item_bytes)
            if part.size > room.get(pair, -1):
                packed.setdefault(pair, []).append([])
                room[pair] = bucket_bytes
            packed[pair][-1].append(part)
            room[pair] -= part.size
    ranks = 1 + max((max(pair) for pair in packed), default=0)
    # each pair's first message, then each one's second; of these by distance, at which each rank has one peer
    ordered = sorted(
        (number, (receiver - sender) % ranks, sender, receiver)
        for (sender, receiver), messages in packed.items()
        for number in range(len(messages))
    )
    return [
        Message(sender, receiver, tuple(packed[sender, receiver][number]))
        for number, _, sender, receiver in ordered
    ]


def rounds_of(messages: Iterable[Message], buckets: int) -> list[list[Message]]:
    """Rounds in which each rank has at most so many messages, sends and receives together."""
    used: dict[int, int] = {}  # places, of a rank
    rounds: list[list[Message]] = []
    for message in messages:
        place = max(used.get(message.sender, 0), used.get(message.receiver, 0))
        used[message.sender] = used[message.receiver] = place + 1
        while len(rounds) <= place // buckets:
            rounds.append([])
        rounds[place // buckets].append(message)
    return rounds


def own_rounds(rounds: Iterable[Iterable[Message]], rank: int) -> list[list[Message]]:
    """Of each round the messages that a rank sends or receives; without rounds in which it has none."""
    own = ([each for each in messages if rank in (each.sender, each.receiver)] for messages in rounds)
    return [messages for messages in own if messages]


class _Senders:
    """Who sends what several ranks hold: the one with least to send so far."""

    def __init__(self, machines: Sequence[Hashable]) -> None:
        self._machines = machines
        self._load = [0] * len(machines)
        self._near: dict[tuple[Holders, Hashable], Holders] = {}
        self._heaps: dict[Holders, list[tuple[int, int]]] = {}

    def choose(self, holders: Holders, receiver: int, size: int) -> int:
        machine = self._machines[receiver]
        candidates = self._near.get((holders, machine))
        if candidates is None:
            near = tuple(rank for rank in holders if self._machines[rank] == machine)
            candidates = self._near[holders, machine] = near or holders
        sender = candidates[0] if len(candidates) == 1 else self._least_loaded(candidates)
        self._load[sender] += size
        return sender

    def _least_loaded(self, candidates: Holders) -> int:
        heap = self._heaps.get(candidates)
        if heap is None:
            heap = self._heaps[candidates] = [(self._load[rank], rank) for rank in candidates]
            heapify(heap)
        while True:
            load, rank = heap[0]
            if load == self._load[rank]:
                return rank
            heapreplace(heap, (self._load[rank], rank))  # it was chosen since, here or among others


_Cells = list[tuple[Block, Holders | None]]  # what one rank needs; None: it holds that itself


def _cells_of(name: str, held: Sequence[Blocks], wanted: Sequence[Blocks]) -> list[_Cells]:
    """What each rank needs, cut so that all of a cell has the same holders."""
    index = _Index(held)
    known: dict[tuple[Blocks, Blocks], _Cells] = {}
    found = []
    for rank, (own, needed) in enumerate(zip(held, wanted, strict=True)):
        if (own, needed) not in known:
            known[own, needed] = [cell for block in needed for cell in _cells(index, own, block)]
        for block, holders in known[own, needed]:
            if holders == ():
                raise ValueError(f"'{name}': rank {rank} needs {_words(block)}, which no rank holds")
        found.append(known[own, needed])
    return found


def _cells(index: _Index, own: Blocks, needed: Block) -> Iterator[tuple[Block, Holders | None]]:
    if not all(begin < end for begin, end in needed):
        return
    lacking = [needed]
    for mine in own:
        rest = []
        for block in lacking:
            if (held := common(block, mine)) is None:
                rest.append(block)
                continue
            yield held, None
            rest += without(block, held)
        lacking = rest
    for block in lacking:
        yield from index.cells(block)


class _Index:
    """Distinct blocks and their holders, in the order of their first rows."""

    def __init__(self, held: Sequence[Blocks]) -> None:
        holders: dict[Block, list[int]] = {}
        for rank, blocks in enumerate(held):
            for block in blocks:
                if all(begin < end for begin, end in block):
                    holders.setdefault(block, []).append(rank)
        self._entries = sorted((block, tuple(ranks)) for block, ranks in holders.items())
        self._begins = [block[0][0] if block else 0 for block, _ in self._entries]
        self._longest = max((block[0][1] - block[0][0] for block, _ in self._entries if block), default=1)

    def cells(self, needed: Block) -> Iterator[tuple[Block, Holders]]:
        """Parts of a block, each with all that hold it."""
        cells: list[tuple[Block, Holders]] = [(needed, ())]
        begin, end = needed[0] if needed else (0, 1)
        first = bisect_left(self._begins, begin - self._longest + 1)
        for block, ranks in self._entries[first : bisect_left(self._begins, end)]:
            if common(block, needed) is None:
                continue
            finer = []
            for cell, holders in cells:
                shared = common(cell, block)
                if shared is not None:
                    finer.append((shared, (*holders, *ranks)))
                    finer += [(rest, holders) for rest in without(cell, shared)]
                elif cell and cell[0][1] <= block[0][0]:
                    yield cell, holders  # all later blocks begin behind it
                else:
                    finer.append((cell, holders))
            cells = finer
        yield from cells


def _words(block: Block) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in block)}]"
