"""In which order a rank posts what it sends and receives."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from tpkernels.comm.transports import c10d


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
