"""Which chunk is sent when, which tile is computed first, what a flag must hold: plain arithmetic.

R ranks exchange a tensor of T rows. Rank r brings the rows of its shard, cut into S sub-chunks; chunks are
numbered by their place in the whole tensor, so that those of rank r are r*S ... r*S + S - 1.

At step s rank r sends to rank r - s, so rank d receives from rank d + s: nobody receives from two at once,
and chunks arrive in the order in which they lie, from the own ones on and round the ring. A tile of rows
that lies in several chunks waits for all of them. Flags hold epochs: call number e raises them to e, and none
is ever reset.
"""

from __future__ import annotations

SLOTS = 2  # buffers in turn: a rank may be one call ahead of another


def push_order(rank: int, ranks: int) -> list[int]:
    """The ranks that `rank` sends to, itself first."""
    return [(rank - step) % ranks for step in range(ranks)]


def chunk_order(rank: int, ranks: int, splits: int = 1) -> list[int]:
    """The chunks as `rank` gets them, its own first."""
    chunks = ranks * splits
    return [(rank * splits + step) % chunks for step in range(chunks)]


def chunk_rows(rows: int, ranks: int, splits: int = 1) -> int:
    """How many rows a chunk has."""
    if ranks < 1 or splits < 1 or rows % (ranks * splits):
        raise ValueError(
            f"expected rows that {ranks} ranks times {splits} sub-chunks divide, got {rows}: pad the tokens"
        )
    return rows // (ranks * splits)


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


def slot_of(epoch: int) -> int:
    """The buffer of call number `epoch`, which counts from 1."""
    return epoch % SLOTS


def reusable_after(epoch: int) -> int:
    """The call that all must have read before `epoch` may be written: the last one in the same slot."""
    return epoch - SLOTS


def wire_bytes(tensor_bytes: int, ranks: int) -> int:
    """What a rank sends, and receives, of a tensor that is gathered or reduced over the ranks."""
    return tensor_bytes // ranks * (ranks - 1)
