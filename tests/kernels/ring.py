"""In which order products compute tiles of rows that arrive, and what each waits for: oracles in Python."""

from tpkernels.comm.schedule import chunk_rows


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
