"""Rounds of collectives, exhaustively: every row once, sent where it is received; products fill a GPU."""

from itertools import product

import pytest

from bench.shapes import all_shapes
from tests.comm.test_schedule import rows_of
from tpkernels.comm.schedule import (
    MOST_CHUNKS,
    Plan,
    bounds,
    collective_gather_plan,
    collective_reduce_plan,
    collective_rounds,
    gather_plan,
    reduce_plan,
)

WORLDS = [  # rows, ranks, rounds
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
def test_rounds_take_every_row_once_and_none_wraps(plan_of):
    for rows, ranks, rounds in WORLDS:
        for plan in plans_of(plan_of, rows, ranks, rounds):
            assert len(plan.rounds) == rounds
            assert sorted(rows_of([round.rows for round in plan.rounds])) == list(range(rows))
            own = plan.rounds[0 if plan_of is collective_gather_plan else -1].rows
            assert own.start <= plan.own.start <= plan.own.stop <= own.stop


@pytest.mark.parametrize("plan_of", PLANS)
def test_in_a_round_each_rank_sends_what_its_peer_receives_in_it(plan_of):
    for rows, ranks, rounds in WORLDS:
        plans = plans_of(plan_of, rows, ranks, rounds)
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
    for rows, ranks, rounds in WORLDS:
        for rank in range(ranks):
            plan = collective_gather_plan(rows, ranks, rank, rounds)
            assert sorted(rows_of([plan.kept, *(swap.received for swap in plan.swaps)])) == list(range(rows))
            for round in plan.rounds:
                own = [plan.own] if round.rows.start <= plan.own.start < round.rows.stop else []
                received = rows_of([*own, *(swap.received for swap in round.swaps)])
                assert sorted(received) == rows_of([round.rows]), "all rows of the product, and no other"
            assert all(swap.sent == plan.own for swap in plan.swaps)


def test_a_reduce_by_rounds_fills_the_slots_that_a_reduce_fills():
    for rows, ranks, rounds in WORLDS:
        for rank in range(ranks):
            plan = collective_reduce_plan(rows, ranks, rank, rounds)
            whole = reduce_plan(rows, ranks, rank, 1, False)
            assert (plan.rows, plan.kept, plan.own) == (whole.rows, whole.kept, whole.own)
            ours, theirs = (
                (
                    {swap.to: (swap.sent, swap.lands) for swap in each.swaps},
                    {swap.source: swap.received for swap in each.swaps},
                )
                for each in (plan, whole)
            )
            assert ours == theirs
            for round in plan.rounds:
                own = [plan.own] if round.rows.start <= plan.own.start < round.rows.stop else []
                sent = rows_of([*own, *(swap.sent for swap in round.swaps)])
                assert sorted(sent) == rows_of([round.rows]), "all rows of the product, and no other"


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
        rounds = collective_rounds(rows, features, ranks, processors)
        assert 1 <= rounds <= MOST_CHUNKS
        assert ranks % rounds == 0

        def waves(pieces, rows=rows, features=features, processors=processors):
            return -(-(rows // pieces) // 128) * -(-features // 256) / processors

        assert rounds == 1 or waves(rounds) >= 2
        more = [n for n in range(rounds + 1, MOST_CHUNKS + 1) if ranks % n == 0]
        assert all(waves(n) < 2 for n in more), "as many as there can be"


def test_what_no_product_hides_is_not_cut():
    assert {collective_rounds(2**20, 0, ranks, 132) for ranks in range(1, 17)} == {1}
    assert collective_rounds(2**20, 4096, 1, 132) == 1


def test_the_rounds_of_known_sizes():
    """T 8192, R 8, K 4096, N / R 1792 on 132 processors."""
    assert collective_rounds(8192, 1792, 8, 132) == 1  # 64 x 7 tiles: 3.4 waves
    assert collective_rounds(8192, 4096, 8, 132) == 2  # 64 x 16 tiles: 7.8 waves
    assert collective_rounds(32768, 4096, 8, 132) == 4
    assert collective_rounds(32768, 4096, 6, 132) == 3
    assert collective_rounds(32768, 4096, 7, 132) == 1
