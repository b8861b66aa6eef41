"""Small messages from all ranks to all."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankFailure
from tpkernels.comm.calls import GroupCalls, begin
from tpkernels.comm.transports.rows import gather_small


def backend(tags: bool) -> Any:
    """One that delivers by tags, as gloo does, or stands for one that goes by order alone, as NCCL does."""
    return patch.object(GroupCalls, "matches_tags", lambda self, device: tags)


def gathered(tags: bool) -> list[Tensor]:
    rank = dist.get_rank()
    parts = [
        torch.full((2, 3), float(rank)),
        torch.arange(6).view(2, 3).t() + 10 * rank,  # not contiguous
        torch.empty(4, 0),
        torch.tensor(rank),
    ]
    with backend(tags):
        return [gather_small(begin("op", "parts", dist.group.WORLD), part) for part in parts]


def stays_away(tags: bool) -> Tensor | None:
    if dist.get_rank() == 1:
        raise SystemExit(3)
    with backend(tags):
        return gather_small(begin("some op", "parts", dist.group.WORLD), torch.ones(2))


@pytest.mark.parametrize("world", ["ranks1", "ranks2", "ranks4"])
@pytest.mark.parametrize("tags", [True, False])
def test_parts_come_in_the_order_of_ranks(request, world, tags):
    pool = request.getfixturevalue(world)
    numbers = torch.arange(pool.world_size)
    for matrix, turned, empty, scalar in pool.run(gathered, tags):
        assert torch.equal(matrix, numbers[:, None, None].expand(-1, 2, 3).float())
        assert torch.equal(turned, torch.arange(6).view(2, 3).t() + 10 * numbers[:, None, None])
        assert empty.shape == (pool.world_size, 4, 0)
        assert torch.equal(scalar, numbers)


@pytest.mark.parametrize(("tags", "words"), [(True, "rows of rank 1 did not arrive"), (False, "rank 0 of 2")])
def test_absent_rank_is_an_error_that_names_the_op(ranks2, tags, words):
    with pytest.raises(RankFailure) as failure:
        ranks2.run(stays_away, tags)
    assert f"some op: {words}" in str(failure.value)
