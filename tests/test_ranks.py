"""The rank pool: what it promises when all is well, and what it says when ranks raise, die or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from tests import rank_functions as do
from tests import ranks
from tests.patience import patient
from tests.ranks import SPAWNED, RankFailure, RankPool

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def fragile() -> Iterator[RankPool]:
    """A pool whose ranks may be killed."""
    with RankPool(2) as pool:
        yield pool


def test_run_returns_in_rank_order(ranks1: RankPool, ranks4: RankPool) -> None:
    assert ranks4.run(do.rank_and_size) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert ranks1.run(do.rank_and_size) == [(0, 1)]


def test_run_sends_arguments_and_collectives_work(ranks2: RankPool) -> None:
    total = torch.tensor([2.0, 5.0])
    for summed in ranks2.run(do.sum_over_ranks, torch.tensor([1.0, 2.5])):
        torch.testing.assert_close(summed, total, rtol=0, atol=0)
    assert ranks2.run_each(do.add, [(1, 2), (30, 40)]) == [3, 70]


def test_run_each_refuses_a_wrong_count(ranks2: RankPool) -> None:
    with pytest.raises(ValueError, match="expected arguments for 2 ranks, got 1"):
        ranks2.run_each(do.add, [(1, 2)])


def test_ranks_live_on(ranks2: RankPool) -> None:
    pids = ranks2.run(os.getpid)
    assert len({*pids, os.getpid()}) == 3
    assert ranks2.run(os.getpid) == pids
    assert ranks2.run(torch.get_num_threads) == [1, 1]


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="PYTHONHASHSEED gives all ranks one order of sets")
def test_ranks_order_sets_each_in_its_own_way(ranks2: RankPool) -> None:
    first, second = ranks2.run(hash, "a word")
    assert first != second


def test_groups_do_not_outlive_a_run(ranks2: RankPool) -> None:
    ranks2.run(do.make_a_lonely_group)  # would shift the names, or the store's keys, of later groups
    assert ranks2.run(do.sum_in_a_new_group) == [2.0, 2.0]


def test_torch_holds_no_more_groups_after_each_run(ranks2: RankPool) -> None:
    found = []
    for columns in (1, 2, 3):
        ranks2.run(do.gather_as_dtensor, columns)
        found.append(ranks2.run(do.groups_of_gloo))
    assert found[0] == found[2], "the threads of others would wake up in all later tests"


def test_excepthook_is_not_wrapped_once_per_run(ranks2: RankPool) -> None:
    assert ranks2.run(do.excepthook_name) == [sys.__excepthook__.__qualname__] * 2


def test_output_belongs_to_the_test(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # would flush on its own
    with RankPool(1, SPAWNED) as pool:  # a new rank, because it inherits the output of now
        pool.run(do.shout)
        output = capfd.readouterr().out  # before the rank ends
    assert "rank 0 was here\n" in output
    assert "rank 0 printed\n" in output


# Ranks raise.


def test_exception_is_told_with_rank_and_traceback(ranks2: RankPool) -> None:
    pids = ranks2.run(os.getpid)
    with pytest.raises(RankFailure) as caught:
        ranks2.run(do.raise_on_rank_1)
    message = str(caught.value)
    assert "1 of 2 ranks failed: tests.rank_functions.raise_on_rank_1" in message
    assert "rank 1: ValueError: no luck" in message
    assert 'raise ValueError("no luck")' in message  # the traceback quotes the line
    assert "rank 0: returned" in message
    assert list(caught.value.exceptions) == [1]
    assert isinstance(caught.value.exceptions[1], ValueError)
    assert ranks2.run(os.getpid) == pids


def test_exceptions_of_all_ranks_are_told(ranks2: RankPool) -> None:
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        ranks2.run(do.raise_on_every_rank)
    for rank in range(2):
        assert f"rank {rank}: ValueError: no luck on rank {rank}" in str(caught.value)
        assert str(caught.value.exceptions[rank]) == f"no luck on rank {rank}"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (do.raise_stubborn, r"rank 0: tests\.rank_functions\.Stubborn: 1 and 2"),
        (do.return_a_lambda, r"return_a_lambda\.<locals>\.<lambda>"),
        (do.leave, "SystemExit: enough"),
    ],
)
def test_what_cannot_be_pickled_or_would_end_a_rank_is_told(
    function: Callable[[], object], said: str, ranks1: RankPool
) -> None:
    pids = ranks1.run(os.getpid)
    with pytest.raises(RankFailure, match=said) as caught:
        ranks1.run(function)
    assert caught.value.exceptions.keys() == {0}
    assert (caught.value.exceptions[0] is None) == (function is do.raise_stubborn)
    assert ranks1.run(os.getpid) == pids


def test_argument_that_cannot_be_pickled_is_an_error_before_sending(ranks2: RankPool) -> None:
    pids = ranks2.run(os.getpid)
    with pytest.raises(TypeError, match=r"tests\.rank_functions\.add and its arguments cannot be sent"):
        ranks2.run_each(do.add, [(1, 2), (1, threading.Lock())])
    assert ranks2.run(os.getpid) == pids


def test_local_function_is_an_error(ranks1: RankPool) -> None:
    with pytest.raises(TypeError, match="expected a function at module level"):
        ranks1.run(lambda: None)


def test_raise_while_the_other_waits_ends_soon(ranks2: RankPool) -> None:
    ranks2.run(do.rank_and_size)  # is started
    start = time.monotonic()
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        ranks2.run(do.raise_on_rank_1, do.reduce)
    assert time.monotonic() - start < patient(15)  # gloo alone would wait for 30
    message = str(caught.value)
    assert message.index("rank 1: ValueError: no luck") < message.index("rank 0: ")  # the cause first
    assert "in reduce" in message[message.index("rank 0: ") :]
    assert isinstance(caught.value.exceptions[0], RuntimeError)  # gloo's: it did not have to be killed
    assert ranks2.run(do.rank_and_size) == [(0, 2), (1, 2)]


def test_raise_while_the_other_hangs_is_told_after_a_grace(
    fragile: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        fragile.run(do.raise_on_rank_1, do.sleep)
    message = str(caught.value)
    assert message.index("rank 1: ValueError: no luck") < message.index("rank 0: no answer in time")
    assert "in sleep" in message[message.index("rank 0: ") :]
    assert caught.value.exceptions[0] is None
    assert fragile.run(do.rank_and_size) == [(0, 2), (1, 2)]


def test_state_is_destroyed_after_a_run(fragile: RankPool) -> None:
    fragile.run(do.set_up_model_parallel, "")
    assert fragile.run(do.model_parallel_is_set_up) == [False, False]


def test_destroying_state_may_fail_the_run(fragile: RankPool) -> None:
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        fragile.run(do.set_up_model_parallel, "a stale group")
    assert "rank 1: KeyError: 'a stale group'" in str(caught.value)
    assert "in destroy_model_parallel" in str(caught.value)
    assert fragile.run(do.rank_and_size) == [(0, 2), (1, 2)]  # the default group went nevertheless


# Ranks hang.


def test_hang_is_told_with_all_stacks(fragile: RankPool) -> None:
    pids = fragile.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        fragile.run(do.sleep, timeout=1)
    assert time.monotonic() - start < patient(10)
    for story in str(caught.value).split("rank 1: "):
        assert "no answer in time" in story
        assert "in sleep" in story
    assert caught.value.exceptions == {0: None, 1: None}
    assert not set(fragile.run(os.getpid)) & set(pids)


def test_lone_collective_is_told_with_all_stacks(fragile: RankPool) -> None:
    fragile.run(do.rank_and_size)  # has imported this module: the time-out is for the collective
    with pytest.raises(RankFailure, match="1 of 2 ranks failed") as caught:
        fragile.run(do.reduce_alone, timeout=1)
    hung, well = str(caught.value).split("rank 1: returned")
    assert "in reduce_alone" in hung
    assert "in _serve" in well
    assert fragile.run(do.rank_and_size) == [(0, 2), (1, 2)]


def test_collective_left_pending_does_not_harm_the_next_run(fragile: RankPool) -> None:
    fragile.run(do.return_before_a_pending_reduce_is_done)
    assert fragile.run(do.sum_in_a_new_group) == [2.0, 2.0]


def test_interrupted_wait_ends_the_ranks(fragile: RankPool) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with watched(fragile.run(os.getpid)) as exits:
            with pytest.raises(KeyboardInterrupt):
                fragile.run(do.alarm_the_parent_and_hang)
            assert all_ended(exits, within=0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert fragile.run(do.rank_and_size) == [(0, 2), (1, 2)]


# Ranks die.


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("exit", "exited with code 3"),
        ("SIGKILL", "killed by signal 9 (Killed)"),
        ("SIGSEGV", "killed by signal 11 (Segmentation fault)"),
    ],
)
def test_death_is_told_soon(fragile: RankPool, how: str, end: str) -> None:
    fragile.run(do.rank_and_size)  # is started
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        fragile.run(do.end_on_rank_1, how)
    assert time.monotonic() - start < patient(20)  # of 60
    message = str(caught.value)
    assert message.splitlines()[1] == f"rank 1: {end}"
    assert caught.value.exceptions[1] is None
    if how == "SIGSEGV":
        assert "in end_on_rank_1" in message
    assert fragile.run(do.rank_and_size) == [(0, 2), (1, 2)]


def test_death_between_runs_is_told_by_the_next() -> None:
    with RankPool(1) as pool:
        os.kill(pool.run(os.getpid)[0], signal.SIGKILL)
        with pytest.raises(RankFailure, match=r"rank 0: killed by signal 9"):
            pool.run(do.rank_and_size)
        assert pool.run(do.rank_and_size) == [(0, 1)]


# Nobody is left behind.


def test_close_ends_all_ranks() -> None:
    with RankPool(1) as pool, watched(pool.run(os.getpid)) as exits:
        pool.close()
        assert all_ended(exits, within=0)


@pytest.mark.sweep
def test_exit_of_the_parent_is_quiet() -> None:
    parent = python("from tests.ranks import RankPool", "RankPool(1).run(report_pid)")
    output, errors = parent.communicate(timeout=patient(120))
    assert output
    assert errors == ""
    assert parent.returncode == 0


@pytest.mark.sweep
def test_ranks_end_with_a_parent_that_is_killed() -> None:
    parent = python("from tests.ranks import RankPool", "RankPool(2).run(report_pid_and_hang)")
    assert parent.stdout is not None
    with watched([int(parent.stdout.readline()) for _ in range(2)]) as exits:
        assert not all_ended(exits, within=0)
        parent.kill()
        assert all_ended(exits, within=patient(20))
    parent.communicate()


def python(*lines: str) -> subprocess.Popen[str]:
    script = "\n".join(["from tests.rank_functions import report_pid, report_pid_and_hang", *lines])
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """File descriptors that turn readable when these processes end: a zombie has, and no pid is mistaken."""
    exits = [os.pidfd_open(pid) for pid in pids]
    try:
        yield exits
    finally:
        for descriptor in exits:
            os.close(descriptor)


def all_ended(exits: list[int], within: float) -> bool:
    deadline = time.monotonic() + within
    return all(wait([descriptor], max(0.0, deadline - time.monotonic())) for descriptor in exits)
