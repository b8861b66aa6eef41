"""Plans which rank sends which block of a tensor to which rank, from the blocks that ranks hold and need.

A block is a range of indices in each dimension of the full tensor, as (begin, end). A rank copies needed
elements that it holds itself. Every other element is sent to it once, by a holder on its own machine if there
is one; several holders send in turn. So a rank computes its own moves without those of other ranks.

>>> rows = [(((0, 4), (0, 2)),), (((4, 8), (0, 2)),)]  # two ranks that hold half of the rows each
>>> columns = [(((0, 8), (0, 1)),), (((0, 8), (1, 2)),)]
>>> for move in moves_of([Placement("w", 2, rows, columns)], machines=[0, 0]):
...     print(move.sender, move.receiver, move.block, move.size)
0 0 ((0, 4), (0, 1)) 8
1 0 ((4, 8), (0, 1)) 8
1 1 ((4, 8), (1, 2)) 8
0 1 ((0, 4), (1, 2)) 8

Blocks are packed into messages of at most `bucket_bytes`. All messages of all ranks have one order, in which
each rank starts its own, a few at a time. So the first message that has not arrived is in flight on both of
its ranks, and no deadlock is possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

Block = tuple[tuple[int, int], ...]
Blocks = tuple[Block, ...]  # that one rank holds, or needs, of a tensor


class Placement(NamedTuple):
    """The blocks of one tensor that each rank holds and wants.

    item_bytes: bytes of an element
    held, wanted: by rank; the blocks of one rank do not overlap
    """

    name: str
    item_bytes: int
    held: Sequence[Blocks]
    wanted: Sequence[Blocks]


class BlockMove(NamedTuple):
    """A block sent from one rank to another, or copied if both are the same."""

    name: str
    sender: int
    receiver: int
    block: Block
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """Blocks that one rank sends to another together."""

    sender: int
    receiver: int
    moves: tuple[BlockMove, ...]

    @property
    def size(self) -> int:
        return sum(move.size for move in self.moves)


def elements(block: Block) -> int:
    """Return the number of elements of a block; 1 for a tensor without dimensions."""
    return prod(end - begin for begin, end in block)


def common(a: Block, b: Block) -> Block | None:
    """Return the intersection of two blocks; None if it is empty."""
    found = []
    for (a_begin, a_end), (b_begin, b_end) in zip(a, b, strict=True):
        begin, end = max(a_begin, b_begin), min(a_end, b_end)
        if begin >= end:
            return None
        found.append((begin, end))
    return tuple(found)


def without(block: Block, cut: Block) -> Iterator[Block]:
    """Yield the rest of a block without `cut`, which lies in it, as blocks that do not overlap."""
    for dim, ((begin, end), (low, high)) in enumerate(zip(block, cut, strict=True)):
        for rest in ((begin, low), (high, end)):
            if rest[0] < rest[1]:
                yield (*cut[:dim], rest, *block[dim + 1 :])


def parts_of(block: Block, most: int) -> Iterator[Block]:
    """Yield parts of a block with at most `most` elements, in the order of its elements."""
    if elements(block) <= most:
        yield block
        return
    dim = next(dim for dim, (begin, end) in enumerate(block) if end - begin > 1)
    begin, end = block[dim]
    each = max(1, most // prod(high - low for low, high in block[dim + 1 :]))
    for first in range(begin, end, each):
        yield from parts_of((*block[:dim], (first, min(first + each, end)), *block[dim + 1 :]), most)


def moves_of(
    placements: Iterable[Placement], machines: Sequence[Hashable], rank: int | None = None
) -> list[BlockMove]:
    """Return all moves, or those of one rank, in an order that is the same on all ranks.

    machines: the machine of each rank
    """
    layouts: dict[tuple[tuple[Blocks, ...], tuple[Blocks, ...]], _PlacementShares] = {}
    moves = []
    for name, item_bytes, held, wanted in placements:
        key = tuple(held), tuple(wanted)
        layout = layouts.get(key)
        if layout is None:  # layers of a model are alike
            layout = layouts[key] = _PlacementShares(
                _shares_of(name, *key, machines, rank), turn=len(layouts)
            )
        for share in layout.shares:
            size = elements(share.block) * item_bytes
            for sender, receiver in share.pairs(layout.turn):
                moves.append(BlockMove(name, sender, receiver, share.block, size))
        layout.turn += 1
    return moves


def steps_of(placements: Iterable[Placement], most_bytes: int) -> list[list[str]]:
    """Group names of tensors into steps that need at most `most_bytes` on any rank, or one tensor."""
    steps: list[list[str]] = []
    taken = 0
    for name, item_bytes, _, wanted in placements:
        size = item_bytes * max(sum(map(elements, blocks)) for blocks in set(wanted))
        if not steps or taken + size > most_bytes:
            steps.append([])
            taken = 0
        steps[-1].append(name)
        taken += size
    return steps


def messages_of(moves: Iterable[BlockMove], bucket_bytes: int, ranks: int) -> list[BlockMessage]:
    """Pack moves into messages, in an order that is the same on all ranks; split blocks larger than a bucket.

    ranks: the size of the world
    """
    packed: dict[tuple[int, int], list[list[BlockMove]]] = {}
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
    # each pair's first message, then each pair's second, ...; by distance, at which each rank has one peer
    ordered = sorted(
        (number, (receiver - sender) % ranks, sender, receiver)
        for (sender, receiver), messages in packed.items()
        for number in range(len(messages))
    )
    return [
        BlockMessage(sender, receiver, tuple(packed[sender, receiver][number]))
        for number, _, sender, receiver in ordered
    ]


@dataclass
class _Share:
    """A block that some ranks need, and the ranks that send it in turn.

    place: the position, among the senders, of the rank whose moves are wanted; None: it is no sender
    own: positions of that rank among the receivers; all positions if all moves are wanted
    """

    block: Block
    senders: tuple[int, ...]
    receivers: list[int] = field(default_factory=list)
    place: int | None = None
    own: Sequence[int] = ()

    def find(self, rank: int | None) -> bool:
        """Note whose moves are wanted; return whether there may be any."""
        if rank is None:
            self.own = range(len(self.receivers))
        else:
            self.own = [number for number, receiver in enumerate(self.receivers) if receiver == rank]
            self.place = self.senders.index(rank) if rank in self.senders else None
        return self.place is not None or len(self.own) > 0

    def pairs(self, turn: int) -> Iterator[tuple[int, int]]:
        """Yield senders and receivers. turn: the position of the first sender"""
        count, numbers = len(self.senders), self.own
        if self.place is not None:
            numbers = sorted({*numbers, *range((self.place - turn) % count, len(self.receivers), count)})
        for number in numbers:
            yield self.senders[(number + turn) % count], self.receivers[number]


@dataclass
class _PlacementShares:
    """The shares of tensors with the same placement. turn: the first sender's position for the next tensor"""

    shares: list[_Share]
    turn: int


def _shares_of(
    name: str,
    held: Sequence[Blocks],
    wanted: Sequence[Blocks],
    machines: Sequence[Hashable],
    rank: int | None,
) -> list[_Share]:
    shares: dict[object, _Share] = {}
    by_machine: dict[int, dict[Hashable, list[int]]] = {}  # the holders of each cell
    for receiver, cells in enumerate(_cells_of(name, held, wanted)):
        machine = machines[receiver]
        for number, block, holders in cells:
            if holders is None:
                shares[number, receiver] = _Share(block, (receiver,), [receiver])
                continue
            if number not in by_machine:
                by_machine[number] = {}
                for holder in holders:
                    by_machine[number].setdefault(machines[holder], []).append(holder)
            near = by_machine[number].get(machine)
            key = number, None if near is None else (machine,)
            if key not in shares:
                shares[key] = _Share(block, tuple(near or holders))
            shares[key].receivers.append(receiver)
    return [share for share in shares.values() if share.find(rank)]


class _Cell(NamedTuple):
    """A block that a rank needs, with the same holders for all of it."""

    number: int  # equal cells have one number
    block: Block
    holders: tuple[int, ...] | None  # None: the rank holds it itself


def _cells_of(name: str, held: Sequence[Blocks], wanted: Sequence[Blocks]) -> list[list[_Cell]]:
    """Return the cells that each rank needs; raise if no rank holds one."""
    index = _Index(held)
    numbers: dict[object, int] = {}
    known: dict[tuple[Blocks, Blocks], list[_Cell]] = {}
    found = []
    for rank, key in enumerate(zip(held, wanted, strict=True)):
        if key not in known:
            own, needed = key
            known[key] = [
                _Cell(numbers.setdefault(cell, len(numbers)), *cell)
                for block in needed
                for cell in _cells(index, own, block)
            ]
        for _, block, holders in known[key]:
            if holders == ():
                raise ValueError(f"'{name}': rank {rank} needs {_words(block)}, which no rank holds")
        found.append(known[key])
    return found


def _cells(index: _Index, own: Blocks, needed: Block) -> Iterator[tuple[Block, tuple[int, ...] | None]]:
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

    def cells(self, needed: Block) -> Iterator[tuple[Block, tuple[int, ...]]]:
        """Yield parts of a block, each with all of its holders."""
        cells: list[tuple[Block, tuple[int, ...]]] = [(needed, ())]
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
                    yield cell, holders  # all later blocks begin after it
                else:
                    finer.append((cell, holders))
            cells = finer
        yield from cells


def _words(block: Block) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in block)}]"
