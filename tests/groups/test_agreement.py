"""`groups/agreement.py`: ranks that disagree, stay away, come late or die, on real gloo ranks."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.on_ranks import equal_on_all, of_all, on_ranks
from tests.patience import patient
from tests.ranks import COLLECTIVE_SECONDS, RankFailure, RankPool
from tpkernels.groups import agreement
from tpkernels.groups.agreement import World
from tpkernels.groups.initialize import create_parallel_state, initialize_model_parallel
from tpkernels.groups.plan import plan_groups
from tpkernels.groups.state import ParallelStateError


def promptly(function: Callable[..., object], *args: object, **options: object) -> tuple[str, str]:
    """Its error, which comes long before the time-out of a collective."""
    start = time.monotonic()
    error = error_of(function, *args, **options)
    assert time.monotonic() - start < patient(COLLECTIVE_SECONDS / 2)
    return error


@pytest.mark.parametrize(
    "sizes",
    [[2, 2, 4, 2], [4, 2, 2, 2], [1, 1, 1, 3], [2, 2, True, 2], [2, "2", 2, 2]],
    ids=["third", "first", "last_not_divisible", "bool", "text"],
)
@on_ranks(4)
def test_ranks_that_disagree_all_get_the_same_error(sizes):
    name, text = equal_on_all(promptly(initialize_model_parallel, sizes[dist.get_rank()]))
    assert name == "ParallelStateError"
    odd = next(size for size in sizes[1:] if repr(size) != repr(sizes[0]))
    for size in (sizes[0], odd):
        call = "" if repr(size) == "1" else f"tensor_model_parallel_size={size!r}"
        assert f"asked for initialize_model_parallel({call})" in text
    assert "rank 0 asked for" in text


@on_ranks(2)
def test_calls_that_differ_in_what_is_no_default_are_a_disagreement():
    odd = dist.get_rank() == 1
    for call in (
        lambda: initialize_model_parallel(timeout=timedelta(seconds=7 if odd else 9)),
        lambda: create_parallel_state(plan_groups(world_size=2, tensor=2 if odd else 1)),
        lambda: initialize_model_parallel() if odd else create_parallel_state(plan_groups(world_size=2)),
    ):
        with pytest.raises(ParallelStateError, match="ranks disagree"):
            call()


@pytest.mark.parametrize("absent", [0, 3])
@on_ranks(4)
def test_rank_that_never_calls_is_named_within_the_timeout(absent):
    seconds = of_all(patient(3.0))[0]  # from now on the time-out tells of one rank only
    error = ("absent", "")
    if dist.get_rank() != absent:
        error = promptly(initialize_model_parallel, 2, timeout=timedelta(seconds=seconds))
    errors = of_all(error)
    assert errors.pop(absent) == ("absent", "")
    assert errors == [errors[0]] * 3
    assert errors[0][0] == "ParallelStateError"
    assert f"rank {absent} did not call it" in errors[0][1]


def die_or_call() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    initialize_model_parallel(2, timeout=timedelta(seconds=1))


def test_rank_that_dies_is_named_to_the_others():
    with RankPool(2) as own, pytest.raises(RankFailure, match="rank 1 did not call it") as failure:
        own.run(die_or_call, timeout=patient(30))
    assert isinstance(failure.value.exceptions[0], ParallelStateError)
    assert "7" in str(failure.value)  # the exit code of the dead rank


# argument -> values that are not its default, though another argument's default may look like them
OTHERS = {
    "tensor_model_parallel_size": [None, 2],
    "pipeline_model_parallel_size": [None, 2],
    "virtual_pipeline_model_parallel_size": [1, 2],
    "pipeline_model_parallel_split_rank": [0, 1],
    "context_parallel_size": [None, 2],
    "expert_model_parallel_size": [None, 2],
    "order": [None, "tp-cp-ep-pp-dp"],
    "timeout": [1, timedelta(seconds=9)],
    "backend": [1, "gloo"],
    "group_options": [{"tp": None}, {1: None, "tp": None}],
}


@on_ranks(2)
def test_default_and_anything_else_are_a_disagreement():
    """Rank 1 alone gives each of these."""
    for argument, values in OTHERS.items():
        for value in values:
            given = {argument: value} if dist.get_rank() == 1 else {}
            words = rf"ranks disagree.*rank 1 asked for initialize_model_parallel\({argument}="
            with pytest.raises(ParallelStateError, match=f"(?s){words}"):
                initialize_model_parallel(**given)


@on_ranks(2)
def test_integers_of_other_libraries_are_integers():
    size = torch.tensor(2) if dist.get_rank() == 1 else 2
    assert initialize_model_parallel(size).size("tp") == 2


@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_late_rank_hears_the_verdict_at_once_whatever_the_store(late, tmp_path):
    rank, is_late = dist.get_rank(), dist.get_rank() == late
    store, world = dist.FileStore(f"{tmp_path}/store", 2), dist.distributed_c10d._get_default_store()
    if is_late:
        world.wait(["the other gave up"])
    timeout = timedelta(seconds=60.0 if is_late else 0.5)
    start = time.monotonic()
    kind, text = error_of(World(store, rank, 2, timeout).agree, "x")
    assert time.monotonic() - start < 58, "the late rank waited, though the verdict was there"
    world.set("the other gave up", "now")
    assert equal_on_all((kind, text))[0] == "ParallelStateError"
    assert f"rank {late} did not call it" in text


def test_verdict_is_one_however_close_the_race():
    """The last rank comes just as the first gives up; what they hear must be the same."""
    races = [(dist.HashStore(), delay) for delay in [0.18, 0.19, 0.195, 0.2, 0.205, 0.21, 0.22] * 3]

    def heard(rank: int, race: int) -> tuple[str, str]:
        store, delay = races[race]
        time.sleep(rank * delay)
        return error_of(World(store, rank, 2, timedelta(seconds=0.2)).agree, "x")

    with ThreadPoolExecutor(2 * len(races)) as threads:  # all races at once
        first, last = ([threads.submit(heard, rank, race) for race in range(len(races))] for rank in (0, 1))
    assert [told.result() for told in first] == [told.result() for told in last]


class LostStore(dist.Store):
    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes")


def test_lost_store_is_told_in_words(monkeypatch):
    monkeypatch.setattr(agreement, "PrefixStore", lambda prefix, store: store)
    with pytest.raises(ParallelStateError, match=r"the store of torch\.distributed is gone.*rank 0"):
        World(LostStore(), 1, 2, timedelta(seconds=1)).agree("x")
