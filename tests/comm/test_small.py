"""Small messages from all ranks to all, and the order in which a rank posts messages."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankFailure
from tpkernels.comm.calls import Calls, begin
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports import c10d
from tpkernels.comm.transports.c10d import gather_small


def backend(tags: bool) -> Any:
    """One that delivers by tags, as gloo does, or stands for one that goes by order alone, as NCCL does."""
    return patch.object(Calls, "has_tags", lambda self, device: tags)


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


def test_messages_travel_from_the_gpu_that_a_group_is_bound_to():
    """Whichever is current: a collective on another device of NCCL's would wait for ever."""
    bound, cpu, gpu = torch.device("cuda", 3), torch.device("cpu"), torch.device("cuda")
    with patch.object(torch.accelerator, "current_device_index", lambda: 1):
        for kinds, device_id, expected in (
            ([gpu], bound, bound),
            ([gpu], None, torch.device("cuda", 1)),
            ([cpu, gpu], bound, cpu),
        ):
            group: Any = SimpleNamespace(_device_types=kinds, bound_device_id=device_id)
            assert exchange_device(group) == expected


@pytest.mark.parametrize("tags", [True, False])
def test_absent_rank_is_an_error_that_names_the_op(ranks2, tags):
    with pytest.raises(RankFailure) as failure:
        ranks2.run(stays_away, tags)
    assert "some op: rows of rank 1 did not arrive" in str(failure.value)


@pytest.mark.parametrize("together", [False, True], ids=["each alone", "one launch"])
def test_a_rank_posts_what_it_receives_before_what_it_sends(together):
    """Behind its own rows its peer would learn too late that it may send. A launch is what all wait for."""
    rows, posted, awaited = torch.zeros(2, 2), [], []

    def post(kind, peer):
        posted.append((kind, peer))
        return Mock(wait=lambda: awaited.append((kind, peer)))

    group = SimpleNamespace(
        send=lambda tensors, to, tag: post("send", to),
        recv=lambda tensors, source, tag: post("receive", source),
    )

    def start_together(group, device, starts):
        works = [start(group) for start in starts]
        return [Mock(wait=lambda: awaited.append("launch"))] if together else works

    launches = c10d.Launches(SimpleNamespace(tag=7, group=group, op="op"), torch.device("cpu"))
    with patch.object(c10d, "start_together", start_together):
        wait = launches.exchange([(1, rows), (2, rows)], [(3, rows), (4, rows)])
    assert posted == [("receive", 3), ("receive", 4), ("send", 1), ("send", 2)]
    wait()
    assert awaited == (["launch"] if together else posted[:2])
    launches.end()
    assert awaited == (["launch"] if together else posted)
