"""What can be known of symmetric memory without a GPU: who is refused, and what a call does to memory."""

from __future__ import annotations

import pytest
import torch

from tests.loopback import VirtualHandle, open_symmetric_loopback, start
from tpkernels.comm.schedule import flag_of, gather_plan
from tpkernels.comm.transports import symmetric
from tpkernels.comm.transports.mailbox import Layout, machine, same_machine
from tpkernels.comm.transports.symmetric import require_gpu_each, why_not


def test_it_says_what_is_lacking():
    assert "exchanges memory of GPUs, got cpu; use shared or c10d" in why_not(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert why_not(torch.device("cuda", 0)) == "torch sees no GPU here"


def test_ranks_beside_are_those_of_the_same_machine():
    assert same_machine([machine(), machine()], 1) == [0, 1]
    assert same_machine(["a boot", "b boot", "a boot"], 2) == [0, 2]
    assert same_machine(["a boot", "b boot", "a boot"], 1) == [1]


def test_ranks_that_share_a_gpu_are_refused_unless_torch_was_told(monkeypatch):
    monkeypatch.delenv(symmetric._OVERLAPPING, raising=False)
    require_gpu_each("it", ["first", "second"], 0)
    for rank in range(3):  # rank 1, too, or it would wait for the others
        with pytest.raises(RuntimeError, match=r"a GPU for each rank, got one for \[0, 2\].*set_device"):
            require_gpu_each("it", ["first", "second", "first"], rank)
    monkeypatch.setenv(symmetric._OVERLAPPING, "1")
    require_gpu_each("it", ["first", "first"], 1)


def test_every_call_begins_with_a_barrier_and_has_its_own_epoch(monkeypatch):
    barriers = []
    monkeypatch.setattr(
        VirtualHandle, "barrier", lambda self, *arguments: barriers.append((self.rank, *arguments))
    )
    first, second = open_symmetric_loopback("it", Layout(2, (4, 3), torch.float32), 1.5)
    assert barriers == [(0, 0, 1500), (1, 0, 1500)]  # memory is zeroed before anybody raises a flag
    deliveries = [start(end, [torch.zeros(4, 3)] * 2) for end in (first, second, first, second)]
    assert [rank for rank, *_ in barriers[2:]] == [0, 1, 0, 1]
    assert [int(delivery.awaited) for delivery in deliveries] == [flag_of(n, 0) for n in (1, 1, 2, 2)]
    assert deliveries[0].slots.data_ptr() != deliveries[2].slots.data_ptr()
    with pytest.raises(RuntimeError, match=r"expected call 1 to be released before call 3 begins"):
        start(first, [torch.zeros(4, 3)] * 2)


def test_rows_and_flags_land_at_the_peer_and_nowhere_else():
    ends = open_symmetric_loopback("it", Layout(3, (4, 2), torch.float32, 2))
    plans = [gather_plan(12, 3, rank, 2, tapered=False) for rank in range(3)]
    deliveries = [end.begin(None, plan, 2, torch.empty(0)) for end, plan in zip(ends, plans, strict=True)]
    rows = torch.arange(4.0).view(2, 2) + 1
    deliveries[2].swap(plans[2].swaps[1], rows)
    assert torch.equal(deliveries[1].slots[2, 2:], rows)
    assert deliveries[1].flags.tolist() == [0, 0, 0, 0, 0, flag_of(1, 0)]
    for delivery in deliveries:
        written = torch.zeros(3, 4, 2)
        if delivery is deliveries[1]:
            written[2, 2:] = rows
        else:
            assert not delivery.flags.any()
        assert torch.equal(delivery.slots, written)


def test_what_is_pushed_is_held_until_it_is_out():
    (end,) = open_symmetric_loopback("it", Layout(1, (4, 2), torch.float32))
    delivery = start(end, [torch.ones(4, 2)])
    assert end.in_flight == {delivery}
    delivery.release()
    delivery.wait()
    assert not end.in_flight
    end.close()
    with pytest.raises(RuntimeError, match="closed: open another"):
        start(end, [torch.ones(4, 2)])
