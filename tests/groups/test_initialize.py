"""`groups/initialize.py` and `state.py` on gloo ranks: groups that work, states, nothing left behind."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.fake_world import fake_rank
from tests.on_ranks import on_ranks
from tpkernels import parallel_state as ps
from tpkernels.groups.initialize import (
    create_parallel_state,
    destroy_model_parallel,
    destroy_parallel_state,
    initialize_model_parallel,
)
from tpkernels.groups.plan import KINDS, plan_groups
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.groups.state import ParallelStateError, current, current_or_none, use


def assert_groups_sum(tensor: int, pipeline: int, split: int | None) -> None:
    """An all-reduce of global ranks in each group gives what the plan says it should."""
    state = initialize_model_parallel(tensor, pipeline, None, split)
    kinds = [kind for kind in KINDS if state.is_member(kind)]
    assert len(kinds) >= (8 if dist.get_world_size() > 1 else len(KINDS))
    for kind in kinds:
        total = torch.tensor(state.rank)
        dist.all_reduce(total, group=state.process_group(kind))
        assert int(total) == sum(state.ranks(kind)), kind


@pytest.mark.parametrize(
    ("tensor", "pipeline", "split"), [(1, 1, None), (2, 2, None), (4, 1, None), (1, 4, 2), (2, 1, None)]
)
@on_ranks(4)
def test_every_group_communicates_among_its_members(tensor, pipeline, split):
    assert_groups_sum(tensor, pipeline, split)


@on_ranks(1)
def test_one_rank_alone_is_a_world():
    assert_groups_sum(1, 1, None)


BAD = [
    ((3,), {}, "InvalidSizes", "world_size (2) is not divisible by"),
    ((2, 1, 2), {}, "InvalidSizes", "greater than 1 with interleaved schedule"),
    ((1, 2, None, 2), {}, "InvalidSizes", "split_rank (2) is not a pipeline stage"),
    ((1.0,), {}, "TypeError", "must be a positive integer, got 1.0"),
    ((2,), {"timeout": 30}, "TypeError", "timeout must be a datetime.timedelta, got 30"),
]


@on_ranks(2)
def test_bad_arguments_are_refused_on_every_rank_alike():
    for sizes, options, name, words in BAD:
        kind, text = error_of(initialize_model_parallel, *sizes, **options)
        assert kind == name
        assert words in text


@on_ranks(2)
def test_initializing_twice_is_an_error_on_all_ranks_that_says_what_to_do():
    """On all ranks, then on rank 0 alone."""
    initialize_model_parallel(2)
    words = r"already initialized: call destroy_model_parallel\(\) first"
    with pytest.raises(ParallelStateError, match=words):
        initialize_model_parallel(2)
    if dist.get_rank() == 1:
        destroy_model_parallel()
    with pytest.raises(ParallelStateError, match="already initialized"):
        initialize_model_parallel(2)


def test_before_initialization_it_is_said_what_to_do():
    assert not dist.is_initialized()
    with pytest.raises(ParallelStateError, match=r"call torch.distributed.init_process_group\(...\) first"):
        initialize_model_parallel(1)
    with pytest.raises(ParallelStateError, match=r"call tpkernels.initialize_model_parallel"):
        current()


@on_ranks(4)
def test_destroy_leaves_nothing_behind_however_often():
    initialize_model_parallel(2, 2)
    destroy_model_parallel()
    assert len(dist.distributed_c10d._world.pg_map) == 1  # the default group alone
    files, group = len(os.listdir("/proc/self/fd")), None
    for i in range(12):
        # the same groups time and again, alternating with others
        initialize_model_parallel(*((2, 2), (4, 1), (1, 2))[i % 3])
        group = ps.get_pipeline_model_parallel_group()
        total = torch.ones(1)
        dist.all_reduce(total, group=ps.get_tensor_model_parallel_group())
        assert total.item() == ps.get_tensor_model_parallel_world_size()
        destroy_model_parallel()
    dist.barrier()
    assert error_of(dist.get_rank, group)[0] == "ValueError"
    del group  # it holds its sockets as long as somebody holds it
    assert len(os.listdir("/proc/self/fd")) - files <= 2  # sockets of 12 rounds would be fifty and more
    assert len(dist.distributed_c10d._world.pg_map) == 1


@on_ranks(4)
def test_ranks_may_have_made_other_groups_before():
    """Ranks with different histories: torch's own local synchronization would wait for ever here."""
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    state = initialize_model_parallel(2, timeout=timedelta(seconds=60))
    total = torch.tensor(state.rank)
    dist.all_reduce(total, group=state.process_group("tp"))
    assert int(total) == (1 if state.rank < 2 else 5)


def test_what_is_refused_leaves_the_state_as_it_is():
    with fake_rank(0, 4):
        with pytest.raises(ValueError, match="the plan is for 8 ranks, but this world has 4"):
            create_parallel_state(plan_groups(world_size=8))
        with pytest.raises(TypeError, match="plan: expected a GroupPlan, as plan_groups"):
            create_parallel_state(4)
    with fake_rank(0, 4):
        with pytest.raises(InvalidSizes):
            initialize_model_parallel(3)
        assert current_or_none() is None
        initialize_model_parallel(2)
    with fake_rank(0, 2):
        state = initialize_model_parallel(2)
        with pytest.raises(TypeError, match="state: expected a ParallelState, got None"), use(None):
            pass
        assert current() is state
    with fake_rank(0, 2):
        state = initialize_model_parallel(2)
        with pytest.raises(AttributeError):
            state.rank = 1


@on_ranks(2)
def test_destroy_after_the_default_group_is_harmless():
    initialize_model_parallel(2)
    dist.destroy_process_group()
    destroy_model_parallel()
    destroy_model_parallel()  # without a state, too
    assert not ps.model_parallel_is_initialized()


@on_ranks(2)
def test_two_states_live_in_one_process():
    first = initialize_model_parallel(2)
    second = create_parallel_state(plan_groups(world_size=2))
    total = torch.ones(1)
    assert current().size("tp") == 2
    with use(second):
        assert ps.get_tensor_model_parallel_world_size() == 1
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        assert total == 2
    assert ps.get_tensor_model_parallel_world_size() == 2
    destroy_parallel_state(second)
    dist.all_reduce(total, group=first.process_group("tp"))
    assert total == 4


def test_use_restores_state_and_changes_on_exceptions():
    with fake_rank(0, 4):
        outer = initialize_model_parallel(2)
        inner = create_parallel_state(plan_groups(world_size=4, pipeline=4, virtual_pipeline=2))
        ps.set_tensor_model_parallel_rank(1)
        with use(inner):
            assert current() is inner
            assert ps.get_tensor_model_parallel_rank() == 0
            assert ps.get_virtual_pipeline_model_parallel_rank() == 0
        assert current() is outer
        with pytest.raises(KeyError), use(inner):
            raise KeyError
        assert current() is outer
        assert ps.get_tensor_model_parallel_rank() == 1
        assert ps.get_virtual_pipeline_model_parallel_rank() is None
        destroy_parallel_state(inner)
