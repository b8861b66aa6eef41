"""`runtime/agreement.py`: ranks that disagree, stay away, come late or die, on real gloo ranks."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.checks import error_of
from tests.ranks import RankFailure
from tpkernels.runtime.initialize import (
    create_parallel_state,
    initialize_model_parallel,
)
from tpkernels.runtime.state import ParallelStateError
from tpkernels.topology.plan import plan_groups


def ask_for_own_size(size_of_rank: list) -> tuple[str, str]:
    return error_of(initialize_model_parallel, size_of_rank[dist.get_rank()])


@pytest.mark.parametrize(
    "sizes",
    [[2, 2, 4, 2], [4, 2, 2, 2], [1, 1, 1, 3], [2, 2, True, 2], [2, "2", 2, 2]],
    ids=["third", "first", "last_not_divisible", "bool", "text"],
)
def test_ranks_that_disagree_all_get_the_same_error(ranks4, sizes):
    start = time.monotonic()
    errors = ranks4.run(ask_for_own_size, sizes)
    assert time.monotonic() - start < 10
    assert len(set(errors)) == 1
    name, text = errors[0]
    assert name == "ParallelStateError"
    odd = next(size for size in sizes[1:] if repr(size) != repr(sizes[0]))
    for size in (sizes[0], odd):
        call = "" if repr(size) == "1" else f"tensor_model_parallel_size={size!r}"
        assert f"asked for initialize_model_parallel({call})" in text
    assert "rank 0 asked for" in text


def disagree_on_options(index: int) -> tuple[str, str]:
    odd = dist.get_rank() == 1
    calls = [
        lambda: initialize_model_parallel(1, 1, None, 0 if odd else None),
        lambda: initialize_model_parallel(order="pp-dp-tp" if odd else "tp-cp-ep-dp-pp"),
        lambda: initialize_model_parallel(timeout=timedelta(seconds=7 if odd else 9)),
        lambda: initialize_model_parallel(backend="gloo" if odd else None),
        lambda: initialize_model_parallel(group_options={"tp": None} if odd else None),
        lambda: create_parallel_state(plan_groups(world_size=2, tensor=2 if odd else 1)),
        lambda: initialize_model_parallel() if odd else create_parallel_state(plan_groups(world_size=2)),
    ]
    return error_of(calls[index])


@pytest.mark.parametrize("index", range(7))
def test_ranks_must_agree_on_every_argument(ranks2, index):
    errors = ranks2.run(disagree_on_options, index)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ParallelStateError"
    assert "ranks disagree" in errors[0][1]


def stay_away_or_call(absent: int, seconds: float) -> tuple[str, str]:
    if dist.get_rank() == absent:
        time.sleep(seconds + 1)
        return "absent", ""
    return error_of(initialize_model_parallel, 2, timeout=timedelta(seconds=seconds))


@pytest.mark.parametrize("absent", [0, 3])
def test_rank_that_never_calls_is_named_within_the_timeout(ranks4, absent):
    start = time.monotonic()
    errors = ranks4.run(stay_away_or_call, absent, 2.0)
    assert time.monotonic() - start < 10
    present = [error for rank, error in enumerate(errors) if rank != absent]
    assert len(set(present)) == 1
    assert present[0][0] == "ParallelStateError"
    assert f"rank {absent} did not call it" in present[0][1]


def arrive_late(seconds: float) -> tuple[str, str]:
    if dist.get_rank() == 1:
        time.sleep(seconds + 1)
    return error_of(initialize_model_parallel, 2, timeout=timedelta(seconds=seconds))


def test_rank_that_comes_late_gets_the_error_that_the_others_got(ranks2):
    errors = ranks2.run(arrive_late, 1.5)
    assert errors[0] == errors[1]
    assert "rank 1 did not call it" in errors[0][1]


def die_or_call() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    initialize_model_parallel(2, timeout=timedelta(seconds=2))


def test_rank_that_dies_is_named_to_the_others(ranks2):
    with pytest.raises(RankFailure, match="rank 1 did not call it") as failure:
        ranks2.run(die_or_call, timeout=30)
    assert isinstance(failure.value.exceptions[0], ParallelStateError)
    assert "7" in str(failure.value)  # the exit code of the dead rank
