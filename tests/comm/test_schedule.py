"""The plan of transfers and of rounds, exhaustively at small sizes: no row is lost, doubled or read early."""

import ast
import sys
from itertools import product
from pathlib import Path

import pytest

from bench.shapes import all_shapes
from tests.kernels.ring import chunks_of_tile, tile_order
from tpkernels.comm import schedule
from tpkernels.comm.schedule import (
    Plan,
    bounds,
    collective_gather_plan,
    collective_reduce_plan,
    cut,
    gather_plan,
    reduce_plan,
)

ROWS = (0, 1, 2, 5, 7, 16, 33)
WORLDS = list(product(ROWS, range(1, 9), range(1, 5)))  # rows, ranks, parts
TILINGS = [
    (ranks, parts, size, block_rows)
    for ranks in (1, 2, 3, 4, 8)
    for parts in (1, 2, 3)
    for size in range(1, 14)
    for block_rows in (1, 4, 8, 16)
]


def rows_of(chunks: list[slice]) -> list[int]:
    return [row for chunk in chunks for row in range(chunk.start, chunk.stop)]


def chunk_order(rank: int, ranks: int, chunks: int) -> list[int]:
    """The chunks of all ranks, numbered as they lie, in the order in which a gather brings them to `rank`."""
    plan = gather_plan(ranks * chunks, ranks, rank, chunks, tapered=False)
    return rows_of([plan.own, *(swap.received for swap in plan.swaps)])


def arrivals(ranks: int, rank: int) -> list[int]:
    """The ranks whose rows `rank` has, in the order in which others send them: its own from the start."""
    plans = {source: list(schedule.peers_by_step(ranks, source)) for source in range(ranks)}
    return [rank] + [
        source for step in range(ranks - 1) for source in range(ranks) if plans[source][step][0] == rank
    ]


def test_chunks_hold_every_row_once():
    for rows, ranks, parts in WORLDS:
        chunks = [cut(rows, ranks, owner, range(1, parts + 1)) for owner in range(ranks)]
        assert [len(each) for each in chunks] == [parts] * ranks
        for owner, each in enumerate(chunks):
            assert rows_of(each) == list(range(*bounds(rows, ranks, owner)))
        assert rows_of([chunk for each in chunks for chunk in each]) == list(range(rows))


def test_each_step_sends_to_one_and_receives_from_one():
    for ranks in range(1, 9):
        plans = [list(schedule.peers_by_step(ranks, rank)) for rank in range(ranks)]
        for rank, plan in enumerate(plans):
            others = [other for other in range(ranks) if other != rank]
            assert sorted(to for to, _ in plan) == others
            assert sorted(source for _, source in plan) == others
            for step, (to, _) in enumerate(plan):
                assert plans[to][step][1] == rank, "whom I send to in a step receives from me in that step"


@pytest.mark.parametrize("tapered", [True, False])
def test_a_gather_brings_every_row_and_a_reduce_fills_every_slot_once(tapered):
    for rows, ranks, parts in WORLDS:
        for rank in range(ranks):
            plan = gather_plan(rows, ranks, rank, parts, tapered)
            brought = rows_of([plan.kept, *(swap.received for swap in plan.swaps)])
            assert sorted(brought) == list(range(rows)) == list(range(plan.rows))
            assert plan.kept == plan.own == slice(*bounds(rows, ranks, rank))
            plan = reduce_plan(rows, ranks, rank, parts, tapered)
            assert plan.own == slice(*bounds(rows, ranks, rank))
            size = plan.own.stop - plan.own.start
            slots = [list(range(source * size, (source + 1) * size)) for source in range(ranks)]
            assert plan.rows == ranks * size
            assert rows_of([plan.kept]) == slots[rank]
            sources = {swap.source for swap in plan.swaps}
            assert sources == set(range(ranks)) - {rank}
            for source in sources:
                assert rows_of([s.received for s in plan.swaps if s.source == source]) == slots[source]


@pytest.mark.parametrize("plan_of", [gather_plan, reduce_plan])
@pytest.mark.parametrize("tapered", [True, False])
def test_what_is_sent_lands_where_it_is_received(plan_of, tapered):
    for rows, ranks, parts in WORLDS:
        plans = [plan_of(rows, ranks, rank, parts, tapered) for rank in range(ranks)]
        for rank, plan in enumerate(plans):
            for n, swap in enumerate(plan.swaps):
                theirs = plans[swap.source].swaps[n]
                assert (theirs.to, theirs.lands) == (rank, swap.received)
                slots = (swap.source - rank) * (plan_of is reduce_plan)
                shift = plan.kept.start - plan.own.start + slots * (plan.own.stop - plan.own.start)
                sent = slice(theirs.sent.start + shift, theirs.sent.stop + shift)
                assert sent == swap.received


def test_chunks_that_nothing_hides_are_small():
    for ranks in (2, 4):
        gathered = [swap.received for swap in gather_plan(40 * ranks, ranks, 0, 4).swaps]
        reduced = [swap.sent for swap in reduce_plan(40 * ranks, ranks, 0, 4).swaps]
        between = [10] * 4 * (ranks - 2)
        assert [chunk.stop - chunk.start for chunk in gathered] == [*between, 16, 12, 8, 4]
        assert [chunk.stop - chunk.start for chunk in reduced] == [4, 8, 12, 16, *between]


def test_chunks_are_consumed_in_the_order_of_arrival():
    for ranks, parts in product(range(1, 9), (1, 2, 4)):
        for rank in range(ranks):
            order = chunk_order(rank, ranks, parts)
            assert order == [s * parts + part for s in arrivals(ranks, rank) for part in range(parts)]
            assert order == [(rank * parts + step) % (ranks * parts) for step in range(ranks * parts)]


def test_parts_grow_with_bytes_and_divide_the_rows():
    counts = [schedule.parts_of_shard(size) for size in (0, 1, 2**18, 2**20, 2**40)]
    assert counts[0] == counts[1] == 1
    assert counts == sorted(counts)
    assert len(set(counts[-2:])) == 1
    for rows, wanted in product(range(1, 40), range(1, 6)):
        parts = schedule.even_chunks(rows, wanted)
        assert rows % parts == 0
        assert not [better for better in range(parts + 1, wanted + 1) if rows % better == 0]


def test_a_gpu_pushes_few_chunks_to_all_others_together():
    large, rows = 2**30, 48
    assert [schedule.pushed_chunks(rows, large, ranks) for ranks in range(2, 10)] == [4, 4, 2, 2, 1, 1, 1, 1]
    for ranks, rows, shard_bytes in product(
        range(1, 17), range(1, 50), (1, schedule.LEAST_BYTES, 2 * schedule.LEAST_BYTES, large)
    ):
        chunks = schedule.pushed_chunks(rows, shard_bytes, ranks)
        assert rows % chunks == 0
        assert chunks <= min(schedule.MOST_CHUNKS, schedule.parts_of_shard(shard_bytes))
        assert chunks == 1 or (ranks - 1) * chunks <= schedule.MOST_PUSHES


def test_a_gather_that_pushes_all_at_once_does_so_in_the_order_of_rounds():
    for rows, ranks, count in ROUNDS:
        for rank in range(ranks):
            plan, block = collective_gather_plan(rows, ranks, rank, count), ranks // count
            turns = [(swap.source // block - rank // block) % count for swap in plan.together.swaps]
            assert turns == sorted(turns)


def test_whole_parts_are_swapped_where_little_more_is_sent():
    for ranks, whole_bytes in product(range(2, 9), (0, 4, 10_000, 100_000, 1_000_000, 2**30)):
        swapped, reduced = (ranks - 1) * whole_bytes, 2 * (ranks - 1) * whole_bytes / ranks
        assert schedule.swaps_full_sums(whole_bytes, ranks) == (swapped - reduced <= schedule.LEAST_BYTES)
    assert schedule.swaps_full_sums(2**40, 2)


def test_even_chunks_are_what_a_kernel_takes_them_for():
    """A kernel divides a row's number by the size of a chunk."""
    for ranks, parts, size in product(range(1, 6), range(1, 4), range(1, 6)):
        rows = ranks * parts * size
        chunks = [chunk for owner in range(ranks) for chunk in cut(rows, ranks, owner, [1] * parts)]
        assert chunks == [slice(n * size, (n + 1) * size) for n in range(ranks * parts)]
        assert schedule.chunk_rows(rows, ranks, parts) == size


def test_no_tile_waits_for_a_chunk_while_a_later_tile_could_be_computed():
    """The last chunk that each tile waits for comes later and later; only the last tile may look back."""
    for ranks, parts, size, block_rows in TILINGS:
        rows, chunks = ranks * parts * size, ranks * parts
        for rank in range(ranks):
            arrival = {chunk: step for step, chunk in enumerate(chunk_order(rank, ranks, parts))}
            needs = [
                max(arrival[chunk] for chunk in chunks_of_tile(tile, rows, chunks, block_rows))
                for tile in tile_order(rank, rows, ranks, block_rows)
            ]
            assert needs == sorted(needs), (rank, ranks, parts, size, block_rows)


def test_a_slot_is_written_only_after_its_last_readers():
    for epoch in range(1, 20):
        assert schedule.slot_of(schedule.reusable_after(epoch)) == schedule.slot_of(epoch)
        between = range(schedule.reusable_after(epoch) + 1, epoch)
        assert all(schedule.slot_of(other) != schedule.slot_of(epoch) for other in between)
        assert len(between) == schedule.SLOTS - 1


@pytest.mark.parametrize(("rows", "ranks", "parts"), [(7, 2, 1), (8, 2, 3), (8, 0, 1)])
def test_rows_that_do_not_divide_are_refused(rows, ranks, parts):
    with pytest.raises(ValueError, match=rf"{ranks} ranks times {parts} chunks divide, got {rows}"):
        schedule.chunk_rows(rows, ranks, parts)


def test_the_schedule_stands_on_the_standard_library_alone():
    tree = ast.parse(Path(schedule.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {str(module).split(".")[0] for module in modules} <= sys.stdlib_module_names


ROUNDS = [  # rows, ranks, rounds
    (rows, ranks, rounds)
    for rows, ranks in product((0, 1, 5, 33, 96), (*range(1, 9), 12, 16))
    for rounds in range(1, ranks + 1)
    if ranks % rounds == 0
]
WIDTHS = sorted({width for shape in all_shapes() for width in (shape.out_features, shape.in_features)})
PROCESSORS = (1, 78, 108, 114, 132, 148, 160)
TOKENS = [2**power for power in range(7, 17)]
PLANS = [collective_gather_plan, collective_reduce_plan]


def plans_of(plan_of, rows: int, ranks: int, rounds: int) -> list[Plan]:
    return [plan_of(rows, ranks, rank, rounds) for rank in range(ranks)]


@pytest.mark.parametrize("plan_of", PLANS)
def test_rounds_take_every_row_once_and_peers_receive_what_ranks_send(plan_of):
    for rows, ranks, rounds in ROUNDS:
        plans = plans_of(plan_of, rows, ranks, rounds)
        for plan in plans:
            assert len(plan.rounds) == rounds
            assert sorted(rows_of([round.rows for round in plan.rounds])) == list(range(rows))
            own = plan.rounds[0 if plan_of is collective_gather_plan else -1].rows
            assert own.start <= plan.own.start <= plan.own.stop <= own.stop
        for number, rank in product(range(rounds), range(ranks)):
            mine = plans[rank].rounds[number].swaps
            own_block = number == (0 if plan_of is collective_gather_plan else rounds - 1)
            assert len(mine) == ranks // rounds - own_block, "as many messages as all others"
            assert len({swap.to for swap in mine}) == len({swap.source for swap in mine}) == len(mine)
            for n, swap in enumerate(mine):
                theirs = plans[swap.source].rounds[number].swaps[n]
                assert (theirs.to, theirs.lands) == (rank, swap.received)
                assert theirs.sent.stop - theirs.sent.start == swap.received.stop - swap.received.start


def test_a_gather_by_rounds_brings_what_a_gather_brings():
    for rows, ranks, rounds in ROUNDS:
        for rank in range(ranks):
            plan = collective_gather_plan(rows, ranks, rank, rounds)
            assert sorted(rows_of([plan.kept, *(swap.received for swap in plan.swaps)])) == list(range(rows))
            for round in plan.rounds:
                own = [plan.own] if round.rows.start <= plan.own.start < round.rows.stop else []
                received = rows_of([*own, *(swap.received for swap in round.swaps)])
                assert sorted(received) == rows_of([round.rows]), "all rows of the product, and no other"
            assert all(swap.sent == plan.own for swap in plan.swaps)


def test_a_reduce_by_rounds_fills_the_slots_that_a_reduce_fills():
    for rows, ranks, rounds in ROUNDS:
        for rank in range(ranks):
            plan = collective_reduce_plan(rows, ranks, rank, rounds)
            whole = reduce_plan(rows, ranks, rank, 1, False)
            assert (plan.rows, plan.kept, plan.own) == (whole.rows, whole.kept, whole.own)
            for of_swap in (
                lambda swap: (swap.to, swap.sent.start, swap.sent.stop, swap.lands.start, swap.lands.stop),
                lambda swap: (swap.source, swap.received.start, swap.received.stop),
            ):
                assert sorted(map(of_swap, plan.swaps)) == sorted(map(of_swap, whole.swaps))
            for round in plan.rounds:
                own = [plan.own] if round.rows.start <= plan.own.start < round.rows.stop else []
                sent = rows_of([*own, *(swap.sent for swap in round.swaps)])
                assert sorted(sent) == rows_of([round.rows]), "all rows of the product, and no other"


def test_a_collective_of_a_reduce_moves_what_its_swaps_do_and_own_rows_once():
    for rows, ranks, rounds in ROUNDS:
        plans = plans_of(collective_reduce_plan, rows, ranks, rounds)
        for number, (rank, plan) in product(range(rounds), enumerate(plans)):
            here, moved = plan.rounds[number], plan.rounds[number].all_to_all
            if not rows or not here.swaps:
                assert moved is None
                continue
            others = [each.rounds[number].all_to_all for each in plans]
            assert moved.received == [each.sent[rank] for each in others]
            assert moved.sources == [swap.source for swap in here.swaps]
            assert sum(moved.sent) == here.rows.stop - here.rows.start
            assert moved.has_own == (number == rounds - 1)
            kept = [plan.kept] if moved.has_own else []
            lands = [*kept, *(swap.received for swap in here.swaps)]
            assert sorted(rows_of(lands)) == rows_of([moved.into]), "as the collective writes them"


@pytest.mark.parametrize("plan_of", [gather_plan, reduce_plan])
def test_a_round_of_chunks_is_one_chunk(plan_of):
    for rows, ranks, chunks in product((0, 5, 33), range(1, 5), (1, 3)):
        for rank in range(ranks):
            plan = plan_of(rows, ranks, rank, chunks)
            assert sorted(rows_of([round.rows for round in plan.rounds])) == list(range(rows))
            alone = [round for round in plan.rounds if not round.swaps]
            assert [round.rows for round in alone] == [slice(*bounds(rows, ranks, rank))]
            assert alone[0] is plan.rounds[0 if plan_of is gather_plan else -1]
            assert all(len(round.swaps) == 1 for round in plan.rounds if round is not alone[0])


def test_a_product_is_cut_only_where_each_piece_fills_the_gpu_twice():
    for ranks, rows, features, processors in product(range(2, 17), TOKENS, WIDTHS, PROCESSORS):
        rounds = schedule.collective_rounds(rows, features, ranks, processors)
        assert 1 <= rounds <= schedule.MOST_CHUNKS
        assert ranks % rounds == 0

        def waves(pieces, rows=rows, features=features, processors=processors):
            return -(-(rows // pieces) // 128) * -(-features // 256) / processors

        assert rounds == 1 or waves(rounds) >= 2
        more = [n for n in range(rounds + 1, schedule.MOST_CHUNKS + 1) if ranks % n == 0]
        assert all(waves(n) < 2 for n in more), "as many as there can be"


def test_the_rounds_of_known_sizes_and_of_what_no_product_hides():
    assert {schedule.collective_rounds(2**20, 0, ranks, 132) for ranks in range(1, 17)} == {1}
    # T 8192, R 8, K 4096, N / R 1792 on 132 processors.
    assert schedule.collective_rounds(8192, 1792, 8, 132) == 1  # 64 x 7 tiles: 3.4 waves
    assert schedule.collective_rounds(8192, 4096, 8, 132) == 2  # 64 x 16 tiles: 7.8 waves
    assert [schedule.collective_rounds(32768, 4096, ranks, 132) for ranks in (8, 6, 7, 1)] == [4, 3, 1, 1]
