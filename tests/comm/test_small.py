"""Small messages from all ranks to all."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankFailure
from tpkernels.comm.small import gather_small


def gathered() -> list[Tensor]:
    rank = dist.get_rank()
    parts = [
        torch.full((2, 3), float(rank)),
        torch.arange(6).view(2, 3).t() + 10 * rank,  # not contiguous
        torch.empty(4, 0),
        torch.tensor(rank),
    ]
    return [gather_small("op", part, dist.group.WORLD) for part in parts]


def stays_away() -> Tensor | None:
    if dist.get_rank() == 1:
        raise SystemExit(3)
    return gather_small("some op", torch.ones(2), dist.group.WORLD)


@pytest.mark.parametrize("world", ["ranks1", "ranks2", "ranks4"])
def test_parts_come_in_the_order_of_ranks(request, world):
    pool = request.getfixturevalue(world)
    numbers = torch.arange(pool.world_size)
    for matrix, turned, empty, scalar in pool.run(gathered):
        assert torch.equal(matrix, numbers[:, None, None].expand(-1, 2, 3).float())
        assert torch.equal(turned, torch.arange(6).view(2, 3).t() + 10 * numbers[:, None, None])
        assert empty.shape == (pool.world_size, 4, 0)
        assert torch.equal(scalar, numbers)


def test_absent_rank_is_an_error_that_names_the_op(ranks2):
    with pytest.raises(RankFailure) as failure:
        ranks2.run(stays_away)
    assert "some op: rank 0 of 2" in str(failure.value)
