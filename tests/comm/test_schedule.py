"""The schedule, exhaustively at small sizes: nothing is lost, doubled, read early or sent twice."""

import ast
import sys
from pathlib import Path

import pytest

from tpkernels.comm import schedule
from tpkernels.comm.schedule import (
    SLOTS,
    chunk_order,
    chunk_rows,
    chunks_of_tile,
    first_tile,
    push_order,
    reusable_after,
    slot_of,
    tile_order,
    wire_bytes,
)

CASES = [
    (ranks, splits, size, block_rows)
    for ranks in (1, 2, 3, 4, 8)
    for splits in (1, 2, 3)
    for size in range(1, 14)
    for block_rows in (1, 4, 8, 16)
]


def test_schedule_sends_every_chunk_once_and_receives_from_one_at_a_time():
    for ranks in range(1, 9):
        orders = [push_order(rank, ranks) for rank in range(ranks)]
        assert all(sorted(order) == list(range(ranks)) for order in orders)
        for step in range(ranks):
            assert sorted(order[step] for order in orders) == list(range(ranks))


def test_schedule_consumes_in_the_order_of_arrival():
    for ranks in range(1, 9):
        for splits in (1, 2, 4):
            for rank in range(ranks):
                arriving = [
                    source * splits + part
                    for step in range(ranks)
                    for source in range(ranks)
                    if push_order(source, ranks)[step] == rank
                    for part in range(splits)
                ]
                assert chunk_order(rank, ranks, splits) == arriving
                assert arriving[0] == rank * splits


def test_schedule_computes_every_tile_once():
    for ranks, splits, size, block_rows in CASES:
        rows = ranks * splits * size
        for rank in range(ranks):
            order = tile_order(rank, rows, ranks, block_rows)
            assert sorted(order) == list(range(-(-rows // block_rows)))


def test_schedule_waits_for_each_row_of_a_tile_and_for_no_other():
    for ranks, splits, size, block_rows in CASES:
        rows, chunks = ranks * splits * size, ranks * splits
        for tile in range(-(-rows // block_rows)):
            tile_rows = range(tile * block_rows, min(rows, (tile + 1) * block_rows))
            assert set(chunks_of_tile(tile, rows, chunks, block_rows)) == {row // size for row in tile_rows}


def test_schedule_starts_with_tiles_that_wait_for_nobody():
    for ranks, splits, size, block_rows in CASES:
        rows, chunks = ranks * splits * size, ranks * splits
        for rank in range(ranks):
            own = set(range(rank * splits, (rank + 1) * splits))
            waits = [
                set(chunks_of_tile(tile, rows, chunks, block_rows)) <= own
                for tile in tile_order(rank, rows, ranks, block_rows)
            ]
            assert waits == sorted(waits, reverse=True)  # those that need no other rank come first


def test_schedule_never_waits_for_a_chunk_while_an_earlier_one_would_do():
    """The last chunk that each tile waits for comes later and later; only the last tile may look back."""
    for ranks, splits, size, block_rows in CASES:
        rows, chunks = ranks * splits * size, ranks * splits
        for rank in range(ranks):
            arrival = {chunk: step for step, chunk in enumerate(chunk_order(rank, ranks, splits))}
            needs = [
                max(arrival[chunk] for chunk in chunks_of_tile(tile, rows, chunks, block_rows))
                for tile in tile_order(rank, rows, ranks, block_rows)
            ]
            assert needs == sorted(needs), (rank, ranks, splits, size, block_rows)


def test_schedule_reads_nothing_before_its_flag():
    """Chunks arrive one by one; a tile that is computed as soon as its flags allow finds all of its rows."""
    for ranks, splits, size, block_rows in CASES:
        rows, chunks = ranks * splits * size, ranks * splits
        for rank in range(ranks):
            flags, arrived = [0] * chunks, set()
            todo = tile_order(rank, rows, ranks, block_rows)
            for chunk in chunk_order(rank, ranks, splits):
                arrived |= set(range(chunk * size, (chunk + 1) * size))
                flags[chunk] = 1
                while todo and all(flags[c] for c in chunks_of_tile(todo[0], rows, chunks, block_rows)):
                    tile = todo.pop(0)
                    assert set(range(tile * block_rows, min(rows, (tile + 1) * block_rows))) <= arrived
            assert not todo


def test_schedule_writes_a_slot_only_after_its_last_readers():
    for epoch in range(1, 20):
        assert slot_of(reusable_after(epoch)) == slot_of(epoch)
        between = range(reusable_after(epoch) + 1, epoch)
        assert all(slot_of(other) != slot_of(epoch) for other in between)
        assert len(between) == SLOTS - 1


def test_schedule_sends_a_shard_to_every_other_rank():
    assert wire_bytes(4096, 1) == 0
    for ranks in range(1, 9):
        shard = 96
        sent = sum(shard for peer in push_order(0, ranks) if peer != 0)
        assert wire_bytes(ranks * shard, ranks) == sent


def test_schedule_takes_no_rows():
    assert tile_order(1, 0, 2, 16) == []
    assert first_tile(1, 0, 2, 16) == 0


@pytest.mark.parametrize(("rows", "ranks", "splits"), [(7, 2, 1), (8, 2, 3), (8, 0, 1)])
def test_schedule_refuses_rows_that_do_not_divide(rows, ranks, splits):
    with pytest.raises(ValueError, match=rf"{ranks} ranks times {splits} sub-chunks divide, got {rows}"):
        chunk_rows(rows, ranks, splits)


def test_schedule_stands_on_the_standard_library_alone():
    tree = ast.parse(Path(schedule.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules <= sys.stdlib_module_names
