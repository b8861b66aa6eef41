"""Which rows travel when: the plan of an exchange, as arithmetic. No torch.

R ranks own the rows of a matrix in rank order, each a shard of them. A shard is cut into pieces, so that a
product can start on the first piece while the others travel. In step s (1 to R-1) each rank sends to the rank
s places after it and receives from the one s places before it: in no step does anybody get two messages.

    a gather    this rank's own rows first, then those of rank-1, rank-2, ...: the order of arrival
    a reduce    rows of rank+1, rank+2, ... first, this rank's own last: what travels is computed first
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# A piece is worth its launch from some size on; more than a few cost the product its efficiency.
MOST_PIECES = 4
LEAST_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of the whole matrix, which belong to rank `owner` of the group."""

    owner: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def bounds(rows: int, parts: int, part: int) -> tuple[int, int]:
    """First and last-plus-one row of a part; the first parts are one row longer where it does not divide."""
    size, longer = divmod(rows, parts)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def cut(rows: int, ranks: int, owner: int, parts: int) -> list[Piece]:
    """One rank's shard in `parts` pieces, in order; some are empty where it has fewer rows than that."""
    first, last = bounds(rows, ranks, owner)
    edges = [bounds(last - first, parts, part) for part in range(parts)]
    return [Piece(owner, first + start, first + stop) for start, stop in edges]


def peers_by_step(ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    """(whom to send to, whom to receive from) in each step."""
    for step in range(1, ranks):
        yield (rank + step) % ranks, (rank - step) % ranks


def parts_of_shard(shard_bytes: int) -> int:
    """How many pieces to cut a shard into. A function of sizes that all ranks share: all cut alike."""
    return max(1, min(MOST_PIECES, shard_bytes // LEAST_BYTES))
