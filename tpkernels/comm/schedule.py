"""Which rows travel when, and what a flag must hold: plain arithmetic.

R ranks own the rows of a matrix in rank order, each a shard of them. A shard is cut into chunks, so that a
product can start on the first while the others travel. In step s (1 to R-1) rank r sends to rank r - s and
receives from rank r + s: in no step does anybody get two messages.

    a gather    this rank's own rows first, then those of rank + 1, rank + 2, ...: as they lie, round the ring
    a reduce    rows of rank - 1, rank - 2, ... first, this rank's own last: what travels is computed first

A plan is a list of rounds: rows that one product takes, and what travels for it in one launch. On a CPU a
round is a chunk. A GPU needs large products and few launches, so there rounds are larger than shards: the
ranks are cut into blocks of neighbours, and a round takes all rows of a block. A rank's own block comes first
in a gather and last in a reduce, the others in the order above. In each round all ranks send and receive
equally, and no block wraps round the end of the matrix.

Where transfers take longer than the product, nothing hides the product of what arrives last, nor that of what
is sent first. So there chunks are tapered: smaller and smaller towards the end, or larger and larger from the
start. Where flags tell of chunks, all are of one size. A flag says which call its chunk is there of; none is
ever reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

# A chunk is worth its launch from some size on; more than a few cost the product its efficiency.
MOST_CHUNKS = 4
LEAST_BYTES = 128 * 1024
MOST_PUSHES = 8  # of a GPU in a gather: each takes the host some microseconds

SLOTS = 2  # buffers in turn: a rank may be one call ahead of another


@dataclass(frozen=True, slots=True)
class Swap:
    """The two chunks that a rank sends and receives at once."""

    to: int
    sent: slice  # rows of the matrix
    lands: slice  # where they land in the memory of `to`
    source: int
    received: slice  # where the chunk of `source` lands in this rank's memory


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The rows that one collective of a reduce moves, own rows included if its round has them."""

    sent: list[int]  # how many rows to each rank
    received: list[int]  # from each
    sources: list[int]  # the other ranks that rows come from
    into: slice  # where they land in this rank's memory
    has_own: bool


@dataclass(frozen=True, slots=True)
class Round:
    """Rows that are multiplied at once when they are there, or computed at once and then sent."""

    rows: slice  # of the matrix
    swaps: tuple[Swap, ...]  # what travels for them, in one launch
    all_to_all: AllToAll | None = None  # the same, where a collective moves it; None without rows


@dataclass(frozen=True)
class Plan:
    """The order in which one rank swaps chunks in a call, and where rows lie in its memory.

    Memory is the gathered matrix, or the slots of a reduce: what each rank sends, in rank order.
    """

    rank: int
    ranks: int
    rows: int  # of memory
    own: slice  # this rank's rows of the matrix
    kept: slice  # where they lie in its memory
    rounds: tuple[Round, ...]

    @cached_property
    def together(self) -> Round:
        """What travels in all rounds, in one launch; other ranks' rows still arrive round by round."""
        return Round(slice(0, self.rows), tuple(swap for round in self.rounds for swap in round.swaps))

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """The swaps of all rounds."""
        return self.together.swaps


def count_of(number: int, noun: str) -> str:
    """Return such as "1 chunk" or "4 chunks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def bounds(rows: int, parts: int, part: int) -> tuple[int, int]:
    """Return first and last-plus-one row of a part; the first parts take the rows of the remainder."""
    size, longer = divmod(rows, parts)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def cut(rows: int, ranks: int, owner: int, shares: Sequence[int]) -> list[slice]:
    """Return one rank's shard in chunks, in order; some are empty where it has fewer rows than that.

    shares: sizes of the chunks, relative to each other
    """
    first, last = bounds(rows, ranks, owner)
    edges = [first + (last - first) * upto // sum(shares) for upto in accumulate(shares, initial=0)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def peers_by_step(ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the rank to send to and the rank to receive from in each step."""
    for step in range(1, ranks):
        yield (rank - step) % ranks, (rank + step) % ranks


@lru_cache(maxsize=256)
def gather_plan(rows: int, ranks: int, rank: int, chunks: int, tapered: bool = True) -> Plan:
    """Return the plan by which `rank` gathers the rows of all; each shard is cut into `chunks`."""
    own = slice(*bounds(rows, ranks, rank))
    rounds = [Round(own, ())]
    for step, (to, source) in enumerate(peers_by_step(ranks, rank), start=1):
        shares = range(chunks, 0, -1) if tapered and step == ranks - 1 else [1] * chunks
        pairs = zip(cut(rows, ranks, rank, shares), cut(rows, ranks, source, shares), strict=True)
        rounds += [Round(received, (Swap(to, sent, sent, source, received),)) for sent, received in pairs]
    return Plan(rank, ranks, rows, own, own, tuple(rounds))


@lru_cache(maxsize=256)
def reduce_plan(rows: int, ranks: int, rank: int, chunks: int, tapered: bool = True) -> Plan:
    """Return the plan by which `rank` receives all partial sums of its rows; shards are cut into `chunks`."""
    own, rounds = slice(*bounds(rows, ranks, rank)), list[Round]()
    for step, (to, source) in enumerate(peers_by_step(ranks, rank), start=1):
        shares = range(1, chunks + 1) if tapered and step == 1 else [1] * chunks
        theirs = slice(*bounds(rows, ranks, to))
        rounds += [
            Round(
                sent, (Swap(to, sent, _in_slot(rank, sent, theirs), source, _in_slot(source, received, own)),)
            )
            for sent, received in zip(
                cut(rows, ranks, to, shares), cut(rows, ranks, rank, shares), strict=True
            )
        ]
    rounds.append(Round(own, ()))
    kept = _in_slot(rank, own, own)
    return Plan(rank, ranks, ranks * (own.stop - own.start), own, kept, tuple(rounds))


@lru_cache(maxsize=256)
def collective_gather_plan(rows: int, ranks: int, rank: int, rounds: int) -> Plan:
    """Return the plan by which `rank` gathers the rows of all in rounds, its own block first."""
    own = slice(*bounds(rows, ranks, rank))
    planned = []
    for ahead, _, peers in _blocks(ranks, rank, rounds):
        shards = [(to, source, slice(*bounds(rows, ranks, source))) for to, source in peers]
        swaps = tuple(Swap(to, own, own, source, received) for to, source, received in shards)
        planned.append(Round(_rows_of_ranks(rows, ranks, ahead), swaps))
    return Plan(rank, ranks, rows, own, own, tuple(planned))


@lru_cache(maxsize=256)
def collective_reduce_plan(rows: int, ranks: int, rank: int, rounds: int) -> Plan:
    """Return the plan by which `rank` receives all partial sums of its rows in rounds, its own block last."""
    own = slice(*bounds(rows, ranks, rank))
    kept = _in_slot(rank, own, own)
    planned = []
    for _, behind, peers in _blocks(ranks, rank, rounds):
        shards = [(to, source, slice(*bounds(rows, ranks, to))) for to, source in peers]
        swaps = tuple(
            Swap(to, sent, _in_slot(rank, sent, sent), source, _in_slot(source, own, own))
            for to, source, sent in shards
        )
        ours = kept if rank in behind else None
        moved = _all_to_all(swaps, ranks, rank, ours) if rows and swaps else None
        planned.append(Round(_rows_of_ranks(rows, ranks, behind), swaps, moved))
    own_last = (*planned[1:], planned[0])
    return Plan(rank, ranks, ranks * (own.stop - own.start), own, kept, own_last)


def _all_to_all(swaps: Sequence[Swap], ranks: int, rank: int, kept: slice | None) -> AllToAll:
    """kept: where own rows belong, if they are in this round"""
    sent, received = [0] * ranks, [0] * ranks
    for swap in swaps:
        sent[swap.to] = swap.sent.stop - swap.sent.start
        received[swap.source] = swap.received.stop - swap.received.start
    starts = [swap.received.start for swap in swaps]
    if kept is not None:
        sent[rank] = received[rank] = kept.stop - kept.start
        starts.append(kept.start)
    into = slice(min(starts), min(starts) + sum(received))
    return AllToAll(sent, received, [swap.source for swap in swaps], into, kept is not None)


def _blocks(ranks: int, rank: int, count: int) -> Iterator[tuple[range, range, list[tuple[int, int]]]]:
    """Of each round: the block it receives from, the block it sends to, and (to, source) of its swaps.

    The ring of `peers_by_step` twice: of blocks, and of the members of a block. So the rank that gets the
    n-th message of a round expects it as its n-th.
    """
    assert ranks % count == 0, "blocks have as many ranks each"
    size = ranks // count
    here, member = divmod(rank, size)
    for step in range(count):
        ahead, behind = ((here + shift) % count * size for shift in (step, -step))
        peers = [(behind + (member - turn) % size, ahead + (member + turn) % size) for turn in range(size)]
        if step == 0:
            del peers[0]  # this rank itself
        yield range(ahead, ahead + size), range(behind, behind + size), peers


def _rows_of_ranks(rows: int, ranks: int, block: range) -> slice:
    return slice(bounds(rows, ranks, block[0])[0], bounds(rows, ranks, block[-1])[1])


def _in_slot(source: int, rows: slice, shard: slice) -> slice:
    """Where rows of a shard lie in its owner's memory, if `source` has sent them."""
    shift = source * (shard.stop - shard.start) - shard.start
    return slice(rows.start + shift, rows.stop + shift)


def parts_of_shard(shard_bytes: int) -> int:
    """Return into how many chunks a shard is cut: a function of sizes that all ranks share."""
    return max(1, min(MOST_CHUNKS, shard_bytes // LEAST_BYTES))


@lru_cache
def collective_rounds(
    rows: int, features: int, ranks: int, processors: int, tile: tuple[int, int] = (128, 256)
) -> int:
    """Return the number of rounds into which a gather or a reduce by collectives is cut.

    The largest up to MOST_CHUNKS that divides the ranks and whose products fill a GPU twice; else one.

    features: width of the product that hides the transfers; 0: there is none
    tile: rows and features of a product that one processor computes at once
    """
    tile_rows, tile_features = tile

    def fills(rounds: int) -> bool:
        return -(-(rows // rounds) // tile_rows) * -(-features // tile_features) >= 2 * processors

    rounds = (n for n in range(min(MOST_CHUNKS, ranks), 1, -1) if ranks % n == 0 and features and fills(n))
    return next(rounds, 1)


def swaps_full_sums(sum_bytes: int, ranks: int) -> bool:
    """Whether each rank sends its full partial sums to all, which add them, instead of a reduce and a gather.

    Each then sends R - 1 times its partial sums, instead of 2 (R - 1) / R times: as much for two ranks. More
    ranks do so where the difference is not worth a chunk. A function of sizes that all ranks share.
    """
    return sum_bytes * (ranks - 1) * (ranks - 2) <= LEAST_BYTES * ranks


def worth_sharing(shard_bytes: int, ranks: int, *, to_all: bool) -> bool:
    """Whether a rank receives enough for shared memory to be faster than sockets.

    to_all: an all-reduce, which is a reduce and a gather through memory. Where c10d swaps full sums instead,
    it is faster up to shards of MOST_CHUNKS chunks. A function of sizes that all ranks share.
    """
    if to_all and swaps_full_sums(ranks * shard_bytes, ranks):
        return shard_bytes >= MOST_CHUNKS * LEAST_BYTES
    return (ranks - 1) * shard_bytes >= LEAST_BYTES


def even_chunks(shard_rows: int, wanted: int) -> int:
    """Return the largest number of equal chunks of a shard, up to `wanted`."""
    return next(chunks for chunks in range(max(1, wanted), 0, -1) if shard_rows % chunks == 0)


def pushed_chunks(shard_rows: int, shard_bytes: int, ranks: int) -> int:
    """Return into how many chunks a GPU cuts the shard that it pushes to each other rank."""
    return even_chunks(shard_rows, min(parts_of_shard(shard_bytes), MOST_PUSHES // max(1, ranks - 1)))


def chunk_rows(rows: int, ranks: int, chunks: int = 1) -> int:
    """Return the rows of a chunk, where all chunks are equal."""
    if ranks < 1 or chunks < 1 or rows % (ranks * chunks):
        raise ValueError(
            f"expected rows that {ranks} ranks times {chunks} chunks divide, got {rows}: pad the tokens"
        )
    return rows // (ranks * chunks)


CODE_BITS = 20  # of a flag: a code of the call; above them is its epoch


def flag_of(epoch: int, code: int) -> int:
    """Return the int32 that flags of call number `epoch` hold; epochs wrap round."""
    word = (epoch << CODE_BITS | code % (1 << CODE_BITS)) % 2**32
    return word - 2**32 if word >= 2**31 else word


def slot_of(epoch: int) -> int:
    """Return the slot of call number `epoch`, which counts from 1."""
    return epoch % SLOTS


def reusable_after(epoch: int) -> int:
    """Return the call that all ranks must have read before `epoch` is written: the last in its slot."""
    return epoch - SLOTS
