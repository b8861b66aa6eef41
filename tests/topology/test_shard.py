"""`topology/shard.py`: every position belongs to one rank, as in Megatron."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.topology.shard import pieces_of, shard_size
from tpkernels.topology.sizes import InvalidSizes


def held(rank: int, size: int, ranks: int, stride: int = 1) -> list[int]:
    return [i for piece in pieces_of(rank, size=size, ranks=ranks, stride=stride) for i in piece]


def test_pieces_are_megatrons():
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


def test_sizes_that_cannot_be_split_are_refused():
    with pytest.raises(InvalidSizes, match=r"output_size \(10\) is not divisible by the 4 ranks .* of 4"):
        shard_size(10, 4, "output_size")
    with pytest.raises(InvalidSizes, match=r"by the 2 ranks .* x stride \(3\) = 6; choose a multiple of 6"):
        pieces_of(0, size=8, ranks=2, stride=3)
    with pytest.raises(InvalidSizes, match="expected 0 to 3"):
        pieces_of(4, size=8, ranks=4)
    with pytest.raises(InvalidSizes, match="positive"):
        shard_size(0, 2)
    with pytest.raises(TypeError, match="stride must be a positive integer"):
        pieces_of(0, size=8, ranks=2, stride=1.0)  # type: ignore[arg-type]
