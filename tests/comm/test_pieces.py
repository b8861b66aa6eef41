"""The plan of an exchange: every row travels once, nobody waits for a row that nobody sends."""

import itertools

import pytest

from tpkernels.comm.pieces import Piece, bounds, cut, parts_of_shard, peers_by_step

WORLDS = [(rows, ranks) for rows in (0, 1, 2, 5, 7, 16, 33) for ranks in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize(("rows", "ranks"), WORLDS)
def test_shards_hold_every_row_once(rows, ranks):
    held = [row for rank in range(ranks) for row in range(*bounds(rows, ranks, rank))]
    assert held == list(range(rows))


@pytest.mark.parametrize(("rows", "ranks"), WORLDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_pieces_hold_every_row_of_a_shard_once(rows, ranks, parts):
    for owner in range(ranks):
        pieces = cut(rows, ranks, owner, parts)
        assert len(pieces) == parts
        assert {piece.owner for piece in pieces} == {owner}
        held = [row for piece in pieces for row in range(piece.start, piece.stop)]
        assert held == list(range(*bounds(rows, ranks, owner)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_rank_sends_once_to_each_other_and_receives_once_in_a_step(ranks):
    plans = [list(peers_by_step(ranks, rank)) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        assert sorted(to for to, _ in plan) == [other for other in range(ranks) if other != rank]
    for step in range(ranks - 1):
        for rank in range(ranks):
            to, _ = plans[rank][step]
            assert plans[to][step][1] == rank, "whom I send to in a step receives from me in that step"


@pytest.mark.parametrize(("rows", "ranks"), WORLDS)
def test_bytes_of_a_gather_are_all_but_the_own_shards(rows, ranks):
    sent = 0
    for rank in range(ranks):
        for _ in peers_by_step(ranks, rank):
            sent += sum(piece.stop - piece.start for piece in cut(rows, ranks, rank, 4))
    assert sent == (ranks - 1) * rows  # over all ranks: (R-1)/R of the matrix for each


def test_number_of_pieces_grows_with_bytes_to_a_limit():
    counts = [parts_of_shard(size) for size in (0, 1, 2**18, 2**20, 2**40)]
    assert counts[0] == counts[1] == 1
    assert counts == sorted(counts)
    assert len(set(counts[-2:])) == 1


def test_a_piece_names_its_rows():
    assert Piece(1, 4, 6).rows == slice(4, 6)
    assert list(itertools.chain(*(range(10)[p.rows] for p in cut(10, 2, 1, 2)))) == list(range(5, 10))
