"""Splitting a vocabulary, exhaustively over small sizes and at those of real models."""

import pytest

from tpkernels.topology.sizes import InvalidSizes
from tpkernels.topology.vocabulary import split_vocabulary


@pytest.mark.parametrize("unit", [1, 2, 3])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_id_belongs_to_one_rank_and_every_rank_holds_as_many_rows(ranks, unit):
    for size in range(1, 40):
        split = split_vocabulary(size, ranks=ranks, divisible_by=unit)
        ids = [split.ids_of(rank) for rank in range(ranks)]
        assert [token for held in ids for token in held] == list(range(size))
        rows = [split.rows_of(rank) for rank in range(ranks)]
        assert [row for held in rows for row in held] == list(range(split.padded_size))
        assert {len(held) for held in rows} == {split.shard_size}
        assert split.padded_size % (ranks * unit) == 0
        assert 0 <= split.padded_size - size < ranks * unit


@pytest.mark.parametrize(
    ("size", "ranks", "unit", "padded"),
    [
        (50257, 1, 128, 50304),  # as Megatron pads GPT-2
        (50257, 8, 128, 51200),
        (50257, 4, 1, 50260),
        (128256, 8, 128, 129024),
        (128256, 8, 1, 128256),
    ],
)
def test_sizes_of_real_vocabularies(size, ranks, unit, padded):
    assert split_vocabulary(size, ranks=ranks, divisible_by=unit).padded_size == padded


def test_a_rank_may_hold_padding_only():
    split = split_vocabulary(3, ranks=4, divisible_by=2)
    assert [len(split.ids_of(rank)) for rank in range(4)] == [2, 1, 0, 0]
    assert list(split.rows_of(3)) == [6, 7]


def test_nonsense_is_refused_in_words():
    with pytest.raises(InvalidSizes, match="vocabulary size must be a positive integer, got 0"):
        split_vocabulary(0, ranks=2)
    with pytest.raises(TypeError, match=r"must be a positive integer, got 1\.5"):
        split_vocabulary(1.5, ranks=2)
    with pytest.raises(InvalidSizes, match="divisible_by must be a positive integer, got 0"):
        split_vocabulary(8, ranks=2, divisible_by=0)
    with pytest.raises(InvalidSizes, match="rank 4 is not in the tensor-parallel group: expected 0 to 3"):
        split_vocabulary(7, ranks=4).ids_of(4)
