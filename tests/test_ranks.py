"""The rank pool and its relatives: results in rank order; a rank that raises, dies or hangs is reported."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.fake_world import each_rank, fake_rank
from tests.on_ranks import on_ranks
from tests.patience import patient
from tests.programs import await_end_of, forked, started
from tests.ranks import RankFailure, RankPool


@pytest.fixture(scope="module")
def fragile():
    """A pool whose ranks may be killed."""
    with RankPool(2) as pool:
        yield pool


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(x):
    dist.all_reduce(x)
    return x.tolist()


def raise_on_rank_1(then="return"):
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    if then == "reduce":
        dist.all_reduce(torch.ones(1))
    elif then == "hang":
        hang()


def hang():
    time.sleep(600)


def end_on_rank_1(how):
    if dist.get_rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.Signals[how])
    dist.barrier()


def write_pid_and_hang(folder):
    Path(folder, str(os.getpid())).touch()
    hang()


def leave_a_pending_collective():
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), async_op=True)


def sum_in_a_new_group():
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    return total.item()


def return_a_lambda():
    return lambda: None


def test_run_returns_results_in_rank_order_from_living_ranks(ranks1, ranks4):
    assert ranks1.run(rank_and_size) == [(0, 1)]
    assert ranks4.run(rank_and_size) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    pids = ranks4.run(os.getpid)
    assert len({*pids, os.getpid()}) == 5
    assert ranks4.run(os.getpid) == pids


def test_run_each_sends_arguments_and_collectives_work(ranks2):
    assert ranks2.run_each(sum_over_ranks, [(torch.tensor([1.0]),), (torch.tensor([2.5]),)]) == [[3.5]] * 2
    with pytest.raises(ValueError, match="expected arguments for 2 ranks, got 1"):
        ranks2.run_each(sum_over_ranks, [(1,)])


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="PYTHONHASHSEED gives all ranks one order of sets")
def test_neighbouring_ranks_order_sets_differently(ranks2):
    first, second = ranks2.run(hash, "a word")
    assert first != second


def test_an_exception_is_reported_with_rank_and_traceback(ranks2):
    pids = ranks2.run(os.getpid)
    with pytest.raises(RankFailure) as caught:
        ranks2.run(raise_on_rank_1)
    message = str(caught.value)
    assert "1 of 2 ranks failed: tests.test_ranks.raise_on_rank_1" in message
    assert message.index("rank 1: ValueError: no luck") < message.index("rank 0: returned")
    assert 'raise ValueError("no luck")' in message
    assert isinstance(caught.value.exceptions[1], ValueError)
    assert ranks2.run(os.getpid) == pids


@pytest.mark.parametrize(
    ("function", "text"),
    [(return_a_lambda, r"return_a_lambda\.<locals>\.<lambda>"), (sys.exit, "SystemExit")],
)
def test_a_result_that_cannot_be_sent_or_an_exit_is_reported(function, text, ranks1):
    with pytest.raises(RankFailure, match=text):
        ranks1.run(function)


def test_a_function_that_cannot_be_sent_is_an_error_before_sending(ranks1):
    with pytest.raises(TypeError, match="expected a function at module level"):
        ranks1.run(lambda: None)


def test_a_rank_that_raises_ends_the_collective_of_the_other(ranks2):
    start = time.monotonic()
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        ranks2.run(raise_on_rank_1, "reduce")
    assert time.monotonic() - start < patient(15)
    message = str(caught.value)
    assert message.index("rank 1: ValueError: no luck") < message.index("rank 0: ")


def test_a_rank_that_hangs_is_reported_with_its_stack(fragile, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 2.0)
    fragile.run(rank_and_size)  # which imports this file
    pids = fragile.run(os.getpid)
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        fragile.run(raise_on_rank_1, "hang")
    first, second = str(caught.value).split("rank 0: no answer in time")
    assert "rank 1: ValueError: no luck" in first
    assert "in hang" in second
    assert not set(fragile.run(os.getpid)) & set(pids)


def test_a_pending_collective_and_lonely_groups_do_not_harm_the_next_call(fragile):
    fragile.run(leave_a_pending_collective)
    assert fragile.run(sum_in_a_new_group) == [2.0, 2.0]


def test_a_call_past_its_timeout_is_reported_with_all_stacks(fragile):
    fragile.run(rank_and_size)
    with pytest.raises(RankFailure) as caught:
        fragile.run(hang, timeout=2)
    assert str(caught.value).count("in hang") == 2


@pytest.mark.parametrize(
    ("how", "end"), [("exit", "exited with code 3"), ("SIGKILL", r"killed by signal 9 \(Killed\)")]
)
def test_a_death_is_reported_soon(fragile, how, end):
    fragile.run(rank_and_size)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 1: {end}"):
        fragile.run(end_on_rank_1, how)
    assert time.monotonic() - start < patient(20)
    assert fragile.run(rank_and_size) == [(0, 2), (1, 2)]


@pytest.mark.sweep
def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    lines = (
        "from tests.ranks import RankPool; from tests.test_ranks import write_pid_and_hang",
        f"RankPool(2).run(write_pid_and_hang, {str(tmp_path)!r})",
    )
    with started("-c", "\n".join(lines)) as parent:
        while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
            time.sleep(0.02)
        parent.kill()
        await_end_of(pids)


@on_ranks(2)
def fails_on_rank_1():
    assert dist.get_rank() == 0, "planted"


@pytest.mark.usefixtures("ranks2")
def test_on_ranks_fails_if_one_rank_fails(request):
    with pytest.raises(RankFailure, match="rank 1: AssertionError: planted"):
        fails_on_rank_1(request=request, size=2)


def test_a_fake_rank_makes_groups_and_leaves_none():
    with fake_rank(5, 8):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (5, 8, "fake")
        dist.all_reduce(torch.ones(1), group=dist.new_group([1, 5]))  # returns, though nobody is there
        with pytest.raises(RuntimeError, match="cannot pose as rank 0 of 4: already rank 5 of 8"):
            fake_rank(0, 4).__enter__()
    assert not dist.is_initialized()
    assert [(rank, dist.get_rank()) for rank in each_rank(100, [99, 7])] == [(99, 99), (7, 7)]


def test_a_fork_answers_and_its_death_is_an_error():
    assert forked(os.getppid) == os.getpid()
    with pytest.raises(EOFError):
        forked(lambda: os.kill(os.getpid(), signal.SIGKILL))
