"""`tests/on_ranks.py`: a body runs on each rank, with what pytest gave, and each rank may fail it."""

import pytest
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ranks import RankFailure


@on_ranks("ranks2")
@pytest.mark.parametrize("number", [3, 4])
def test_the_body_runs_on_ranks(number):
    assert dist.get_world_size() == 2
    assert number in (3, 4)


@on_ranks("pool")
def fails_on_rank_1():
    assert dist.get_rank() == 0, "planted"


def test_one_rank_is_enough_to_fail(ranks2):
    with pytest.raises(RankFailure, match="rank 1: AssertionError: planted"):
        fails_on_rank_1(pool=ranks2)
