"""Which rows travel when, which tile is computed first, what a flag must hold: plain arithmetic.

R ranks own the rows of a matrix in rank order, each a shard of them. A shard is cut into chunks, so that a
product can start on the first while the others travel. In step s (1 to R-1) rank r sends to rank r - s and
receives from rank r + s: in no step does anybody get two messages.

    a gather    this rank's own rows first, then those of rank + 1, rank + 2, ...: as they lie, round the ring
    a reduce    rows of rank - 1, rank - 2, ... first, this rank's own last: what travels is computed first

Where transfers take longer than the product, nothing hides the product of what arrives last, nor that of what
is sent first. So there chunks get smaller and smaller towards the end, or larger and larger from the start.

Who waits for flags computes tiles of rows in the order of arrival, each once all chunks that it has rows of
are there; for this, chunks are of one size. A flag says which call its chunk is there of; none is ever reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# A chunk is worth its launch from some size on; more than a few cost the product its efficiency.
MOST_CHUNKS = 4
LEAST_BYTES = 128 * 1024

SLOTS = 2  # buffers in turn: a rank may be one call ahead of another


@dataclass(frozen=True, slots=True)
class Chunk:
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


Shares = Sequence[int]  # sizes of a shard's chunks, relative to each other


def cut(rows: int, ranks: int, owner: int, shares: Shares) -> list[Chunk]:
    """One rank's shard in chunks, in order; some are empty where it has fewer rows than that."""
    first, last = bounds(rows, ranks, owner)
    edges = [first + (last - first) * upto // sum(shares) for upto in accumulate(shares, initial=0)]
    return [Chunk(owner, start, stop) for start, stop in pairwise(edges)]


def peers_by_step(ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    """(whom to send to, whom to receive from) in each step."""
    for step in range(1, ranks):
        yield (rank - step) % ranks, (rank + step) % ranks


def source_of(ranks: int, rank: int, to: int) -> int:
    """Whom to receive from in the step that sends to `to`."""
    return (2 * rank - to) % ranks


@dataclass(frozen=True, slots=True)
class Swap:
    """What a rank sends and receives at once."""

    to: int
    sent: Chunk
    source: int
    received: Chunk


def gather_swaps(rows: int, ranks: int, rank: int, parts: int) -> Iterator[Swap]:
    """What `rank` swaps, in this order, until it has the rows of all."""
    for step, (to, source) in enumerate(peers_by_step(ranks, rank), start=1):
        shares = range(parts, 0, -1) if step == ranks - 1 else [1] * parts
        chunks = zip(cut(rows, ranks, rank, shares), cut(rows, ranks, source, shares), strict=True)
        yield from (Swap(to, sent, source, received) for sent, received in chunks)


def reduce_swaps(rows: int, ranks: int, rank: int, parts: int) -> Iterator[Swap]:
    """What `rank` swaps, in this order, until it has what all others have for its own rows."""
    for step, (to, source) in enumerate(peers_by_step(ranks, rank), start=1):
        shares = range(1, parts + 1) if step == 1 else [1] * parts
        chunks = zip(cut(rows, ranks, to, shares), cut(rows, ranks, rank, shares), strict=True)
        yield from (Swap(to, sent, source, received) for sent, received in chunks)


def parts_of_shard(shard_bytes: int) -> int:
    """How many chunks to cut a shard into. A function of sizes that all ranks share: all cut alike."""
    return max(1, min(MOST_CHUNKS, shard_bytes // LEAST_BYTES))


def swaps_whole_parts(whole_bytes: int, ranks: int) -> bool:
    """Whether ranks sum what all of them send in one step, instead of a reduce and a gather after it.

    Each sends (R - 1) times the whole then, and not 2 (R - 1) / R times: as much for two ranks. More ranks do
    so where what is sent more is not worth a chunk. A function of sizes that all ranks share.
    """
    return whole_bytes * (ranks - 1) * (ranks - 2) <= LEAST_BYTES * ranks


def even_parts(shard_rows: int, wanted: int) -> int:
    """The most parts, up to `wanted`, that have as many rows each."""
    return next(parts for parts in range(max(1, wanted), 0, -1) if shard_rows % parts == 0)


def chunk_rows(rows: int, ranks: int, parts: int = 1) -> int:
    """How many rows each chunk has, where all have as many."""
    if ranks < 1 or parts < 1 or rows % (ranks * parts):
        raise ValueError(
            f"expected rows that {ranks} ranks times {parts} chunks divide, got {rows}: pad the tokens"
        )
    return rows // (ranks * parts)


def chunk_order(rank: int, ranks: int, parts: int = 1) -> list[int]:
    """The chunks of all ranks, numbered as they lie, in the order in which `rank` gets them."""
    sources = [rank, *(source for _, source in peers_by_step(ranks, rank))]
    return [source * parts + part for source in sources for part in range(parts)]


def first_tile(rank: int, rows: int, ranks: int, block_rows: int) -> int:
    """The first tile that begins in the rows of `rank`; one that reaches into them from before comes last."""
    own_row = rank * chunk_rows(rows, ranks)
    return -(-own_row // block_rows) % max(1, -(-rows // block_rows))


def tile_order(rank: int, rows: int, ranks: int, block_rows: int) -> list[int]:
    """The tiles of rows as `rank` computes them: from its own rows on, round the ring."""
    tiles = -(-rows // block_rows)
    return [(first_tile(rank, rows, ranks, block_rows) + step) % tiles for step in range(tiles)]


def chunks_of_tile(tile: int, rows: int, chunks: int, block_rows: int) -> range:
    """The chunks that a tile has rows of, all of which it waits for."""
    size = chunk_rows(rows, chunks)
    last_row = min((tile + 1) * block_rows, rows) - 1
    return range(tile * block_rows // size, last_row // size + 1)


CODE_BITS = 20  # of a flag: a code of the call; above them is its epoch


def flag_of(epoch: int, code: int) -> int:
    """What the flags of call number `epoch` hold, an int32; epochs wrap round."""
    word = (epoch << CODE_BITS | code % (1 << CODE_BITS)) % 2**32
    return word - 2**32 if word >= 2**31 else word


def is_other_call(seen: int, awaited: int) -> bool:
    """Whether a flag is of the same epoch as the one awaited, but of another call."""
    return seen != awaited and seen >> CODE_BITS == awaited >> CODE_BITS


def slot_of(epoch: int) -> int:
    """The buffer of call number `epoch`, which counts from 1."""
    return epoch % SLOTS


def reusable_after(epoch: int) -> int:
    """The call that all must have read before `epoch` may be written: the last one in the same slot."""
    return epoch - SLOTS
