"""`tests/on_ranks.py`: a body runs on each rank, with what pytest gave, and each rank may fail it."""

import pytest
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ranks import RankFailure


@pytest.mark.parametrize("number", [3, 4])
@on_ranks(1, 2)
def test_the_body_runs_on_ranks(number):
    assert dist.get_world_size() in (1, 2)
    assert number in (3, 4)


@pytest.mark.parametrize("world", ["ranks2"])
@on_ranks()
def test_the_body_runs_on_the_ranks_of_the_fixture(world):
    assert dist.get_world_size() == 2
    assert world == "ranks2"


@on_ranks(2)
def fails_on_rank_1():
    assert dist.get_rank() == 0, "planted"


@pytest.mark.usefixtures("ranks2")
def test_one_rank_is_enough_to_fail(request):
    with pytest.raises(RankFailure, match="rank 1: AssertionError: planted"):
        fails_on_rank_1(request=request, size=2)
