"""Posing as ranks: right numbers inside, nothing left outside."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fake_world import each_rank, fake_rank


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    yield
    assert not dist.is_initialized()


def test_fake_rank_can_make_groups() -> None:
    with fake_rank(5, 8):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (5, 8, "fake")
        mine, other = dist.new_group([1, 5]), dist.new_group([2, 6])
        assert (dist.get_rank(mine), dist.get_world_size(mine)) == (1, 2)
        assert dist.get_rank(other) == -1
        dist.all_reduce(torch.ones(1), group=mine)  # returns, though nobody is there


def test_fake_rank_may_be_left_by_an_exception_or_early() -> None:
    with pytest.raises(AssertionError), fake_rank(0, 2):
        assert dist.get_rank() == 1
    assert not dist.is_initialized()
    with fake_rank(0, 2):
        dist.destroy_process_group()


def test_fake_rank_refuses_a_second_world() -> None:
    with fake_rank(1, 2):
        with pytest.raises(RuntimeError, match="cannot pose as rank 0 of 4: already rank 1 of 2"):
            fake_rank(0, 4).__enter__()
        assert dist.get_world_size() == 2  # the first one is still there


@pytest.mark.parametrize("rank", [-1, 2])
def test_fake_rank_refuses_a_rank_outside_the_world(rank: int) -> None:
    with pytest.raises(ValueError, match=f"expected a rank below the world size of 2, got {rank}"):
        fake_rank(rank, 2).__enter__()


def test_fake_rank_destroys_model_parallel_state_first(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed = []
    module: Any = SimpleNamespace(destroy_model_parallel=lambda: destroyed.append(dist.is_initialized()))
    monkeypatch.setitem(sys.modules, "tpkernels.groups.initialize", module)
    with fake_rank(0, 2):
        pass
    assert destroyed == [True]


def test_each_rank_is_each_rank_or_each_of_some() -> None:
    assert [(rank, dist.get_rank()) for rank in each_rank(3)] == [(0, 0), (1, 1), (2, 2)]
    assert [(rank, dist.get_rank()) for rank in each_rank(100, [99, 7])] == [(99, 99), (7, 7)]


def fail_on_rank_1() -> None:
    for rank in each_rank(3):
        assert rank < 1


def test_each_rank_is_left_on_break_and_when_the_loop_raises() -> None:
    for _ in each_rank(3):
        break
    assert not dist.is_initialized()
    with pytest.raises(AssertionError) as caught:
        fail_on_rank_1()
    assert not dist.is_initialized()  # although the traceback keeps the frames of the loop
    assert caught.traceback


def test_each_rank_of_a_large_world_is_quick() -> None:
    start, hook = time.process_time(), sys.excepthook
    for _ in each_rank(2048):
        dist.new_group([0, 1, 2, 3])
    assert sys.excepthook is hook  # torch's init_process_group would wrap it 2048 times
    assert time.process_time() - start < 10
