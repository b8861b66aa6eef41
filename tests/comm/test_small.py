"""Small messages from all ranks to all, and the order in which a rank posts messages."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankFailure
from tpkernels.comm.calls import GroupCalls, begin
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports import c10d
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


@pytest.mark.parametrize(("tags", "words"), [(True, "rows of rank 1 did not arrive"), (False, "rank 0 of 2")])
def test_absent_rank_is_an_error_that_names_the_op(ranks2, tags, words):
    with pytest.raises(RankFailure) as failure:
        ranks2.run(stays_away, tags)
    assert f"some op: {words}" in str(failure.value)


class Posting:
    """A group that notes what is posted."""

    def __init__(self):
        self.posted = []

    def send(self, tensors, to, tag):
        self.posted.append(("send", to))
        return ("sent", to)

    def recv(self, tensors, source, tag):
        self.posted.append(("receive", source))
        return ("received", source)


def test_a_rank_posts_what_it_receives_before_what_it_sends():
    """Behind its own rows its peer would learn too late that it may send."""
    group, rows = Posting(), torch.zeros(2, 2)
    transfers = c10d.Transfers(SimpleNamespace(tag=7, group=group, op="op"))
    with patch.object(
        c10d, "start_together", lambda group, device, starts: [start(group) for start in starts]
    ):
        received = transfers.exchange_all([(1, rows), (2, rows)], [(3, rows)])
    assert group.posted == [("receive", 3), ("send", 1), ("send", 2)]
    assert received == [("received", 3)]
    assert [(work, peers) for work, peers, _ in transfers._sends] == [(("sent", 1), [1]), (("sent", 2), [2])]


def test_one_launch_is_what_all_of_its_messages_wait_for():
    rows = torch.zeros(2, 2)
    transfers = c10d.Transfers(SimpleNamespace(tag=7, group=None, op="op"))
    with patch.object(c10d, "start_together", lambda *_: ["launch"]):
        assert transfers.exchange_all([(1, rows)], [(2, rows), (3, rows)]) == ["launch", "launch"]
    assert [work for work, *_ in transfers._sends] == ["launch"]
