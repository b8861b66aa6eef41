"""`groups/sizes.py`: every position, and every id of a vocabulary, belongs to one rank."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.groups.sizes import InvalidSizes, ranges_of, shard_size, split_vocabulary


def held(rank: int, size: int, ranks: int, stride: int = 1) -> list[int]:
    return [i for each in ranges_of(rank, size=size, ranks=ranks, stride=stride) for i in each]


def test_ranges_are_megatrons():
    assert held(0, 8, 2, 2) == [0, 1, 4, 5]
    assert held(1, 8, 2, 2) == [2, 3, 6, 7]
    assert held(1, 8, 4) == [2, 3]
    assert held(0, 12, 2, 3) == [0, 1, 4, 5, 8, 9]
    assert held(0, 8, 1, 4) == list(range(8))


@given(length=st.integers(1, 5), ranks=st.integers(1, 9), stride=st.integers(1, 5))
def test_each_position_is_held_once(length, ranks, stride):
    size = length * ranks * stride
    shards = [held(rank, size, ranks, stride) for rank in range(ranks)]
    assert {len(shard) for shard in shards} == {shard_size(size, ranks)}
    assert sorted(i for shard in shards for i in shard) == list(range(size))


@given(length=st.integers(1, 5), ranks=st.integers(1, 9), stride=st.integers(1, 5))
def test_stacked_weights_stay_stacked(length, ranks, stride):
    """A stride of s splits each of s equal weights, stacked in one, as if it were alone."""
    alone = length * ranks
    for rank in range(ranks):
        expected = [weight * alone + i for weight in range(stride) for i in held(rank, alone, ranks)]
        assert held(rank, alone * stride, ranks, stride) == expected


def test_sizes_and_vocabularies_that_cannot_be_split_are_refused():
    with pytest.raises(InvalidSizes, match=r"output_size \(10\) is not divisible by the 4 ranks .* of 4"):
        shard_size(10, 4, "output_size")
    with pytest.raises(InvalidSizes, match=r"by the 2 ranks .* x stride \(3\) = 6; choose a multiple of 6"):
        ranges_of(0, size=8, ranks=2, stride=3)
    with pytest.raises(InvalidSizes, match="expected 0 to 3"):
        ranges_of(4, size=8, ranks=4)
    with pytest.raises(InvalidSizes, match="positive"):
        shard_size(0, 2)
    with pytest.raises(TypeError, match="stride must be a positive integer"):
        ranges_of(0, size=8, ranks=2, stride=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidSizes, match="vocabulary size must be a positive integer, got 0"):
        split_vocabulary(0, ranks=2)
    with pytest.raises(TypeError, match=r"must be a positive integer, got 1\.5"):
        split_vocabulary(1.5, ranks=2)
    with pytest.raises(InvalidSizes, match="divisible_by must be a positive integer, got 0"):
        split_vocabulary(8, ranks=2, divisible_by=0)
    split = split_vocabulary(7, ranks=4)
    with pytest.raises(InvalidSizes, match="rank 4 is not in the tensor-parallel group: expected 0 to 3"):
        split.ids_of(4)


def test_every_id_belongs_to_one_rank_and_every_rank_holds_as_many_rows():
    for ranks, unit, size in product(range(1, 9), (1, 2, 3), range(1, 40)):
        split = split_vocabulary(size, ranks=ranks, divisible_by=unit)
        ids = [split.ids_of(rank) for rank in range(ranks)]
        assert [token for own in ids for token in own] == list(range(size))
        rows = [split.rows_of(rank) for rank in range(ranks)]
        assert [row for own in rows for row in own] == list(range(split.padded_size))
        assert {len(own) for own in rows} == {split.shard_size}
        assert split.padded_size % (ranks * unit) == 0
        assert 0 <= split.padded_size - size < ranks * unit


def test_sizes_of_real_vocabularies_and_ranks_that_hold_padding_only():
    for (size, ranks, unit), padded in {  # as Megatron pads
        (50257, 1, 128): 50304,
        (50257, 8, 128): 51200,
        (50257, 4, 1): 50260,
        (128256, 8, 128): 129024,
        (128256, 8, 1): 128256,
    }.items():
        assert split_vocabulary(size, ranks=ranks, divisible_by=unit).padded_size == padded
    split = split_vocabulary(3, ranks=4, divisible_by=2)
    assert [len(split.ids_of(rank)) for rank in range(4)] == [2, 1, 0, 0]
    assert list(split.rows_of(3)) == [6, 7]
