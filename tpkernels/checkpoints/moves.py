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
0 1 ((0, 4), (1, 2)) 8
1 1 ((4, 8), (1, 2)) 8

Blocks are packed into messages of at most `bucket_bytes`. All messages of all ranks have one order, in which
each rank starts its own, a few at a time. So the first message that has not arrived is in flight on both of
its ranks, and no deadlock is possible.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
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


class BlockMessage(NamedTuple):
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
    shares_of: dict[object, list[_Share]] = {}
    turns: dict[object, int] = {}  # the position of the first sender, by layout
    moves = []
    for name, item_bytes, held, wanted in placements:
        layout = tuple(held), tuple(wanted)
        if layout not in shares_of:  # layers of a model are alike
            shares = _shares_of(name, *layout, machines)
            shares_of[layout] = [each for each in shares if rank is None or each.has(rank)]
            turns[layout] = len(turns)
        first = turns[layout]
        for block, senders, receivers in shares_of[layout]:
            size = elements(block) * item_bytes
            for turn, receiver in enumerate(receivers, start=first):
                sender = senders[turn % len(senders)]
                if rank is None or rank in (sender, receiver):
                    moves.append(BlockMove(name, sender, receiver, block, size))
        turns[layout] += 1
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


class _Share(NamedTuple):
    """A block, the ranks that send it in turn, and the ranks that need it."""

    block: Block
    senders: tuple[int, ...]
    receivers: list[int]

    def has(self, rank: int) -> bool:
        return rank in self.senders or rank in self.receivers


def _shares_of(
    name: str, held: Sequence[Blocks], wanted: Sequence[Blocks], machines: Sequence[Hashable]
) -> list[_Share]:
    """Cut the needed blocks where their holders change; raise if no rank holds one."""
    holders_of: dict[Block, list[int]] = {}
    for rank, blocks in enumerate(held):
        for block in filter(elements, blocks):
            holders_of.setdefault(block, []).append(rank)
    in_order = [(block, tuple(ranks)) for block, ranks in sorted(holders_of.items())]
    cells_of: dict[Block, list[tuple[Block, tuple[int, ...]]]] = {}
    shares: dict[object, _Share] = {}
    for receiver, blocks in enumerate(wanted):
        for needed in filter(elements, blocks):
            if needed not in cells_of:
                cells_of[needed] = list(_cells(needed, in_order))
            for block, holders in cells_of[needed]:
                if not holders:
                    ranges = ", ".join(f"{begin}:{end}" for begin, end in block)
                    raise ValueError(f"'{name}': rank {receiver} needs [{ranges}], which no rank holds")
                senders = tuple(rank for rank in holders if machines[rank] == machines[receiver]) or holders
                if receiver in holders:
                    senders = (receiver,)
                shares.setdefault((block, senders), _Share(block, senders, [])).receivers.append(receiver)
    return list(shares.values())


def _cells(
    needed: Block, held: Sequence[tuple[Block, tuple[int, ...]]]
) -> Iterator[tuple[Block, tuple[int, ...]]]:
    """Yield parts of a block, each with all of its holders. held: blocks in order, with their holders"""
    cells: list[tuple[Block, tuple[int, ...]]] = [(needed, ())]
    for block, ranks in held:
        if needed and (block[0][1] <= needed[0][0] or needed[0][1] <= block[0][0]):
            continue  # cheaper than `common`
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
