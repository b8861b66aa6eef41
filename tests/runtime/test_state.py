"""`runtime/state.py`: one state at a time, and a second one beside it."""

import pytest
import torch
import torch.distributed as dist

from tests.fake_world import fake_rank
from tpkernels import parallel_state as ps
from tpkernels.runtime.initialize import (
    create_parallel_state,
    destroy_parallel_state,
    initialize_model_parallel,
)
from tpkernels.runtime.state import ParallelStateError, current, use
from tpkernels.topology.plan import plan_groups


def test_current_state_before_initialization_says_what_to_do():
    with pytest.raises(ParallelStateError, match=r"call tpkernels.initialize_model_parallel"):
        current()


def two_states_at_once() -> list[int]:
    first = initialize_model_parallel(2)
    second = create_parallel_state(plan_groups(world_size=2))
    sizes = [current().size("tp")]
    with use(second):
        sizes.append(ps.get_tensor_model_parallel_world_size())
        total = torch.ones(1)
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        sizes.append(int(total))
    sizes.append(ps.get_tensor_model_parallel_world_size())
    destroy_parallel_state(second)
    total = torch.ones(1)
    dist.all_reduce(total, group=first.process_group("tp"))
    return [*sizes, int(total)]


def test_two_states_live_in_one_process(ranks2):
    assert ranks2.run(two_states_at_once) == [[2, 1, 2, 2, 2]] * 2


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


def test_what_is_no_state_leaves_the_current_one():
    with fake_rank(0, 2):
        state = initialize_model_parallel(2)
        with pytest.raises(TypeError, match="state: expected a ParallelState, got None"), use(None):
            pass
        assert current() is state


def test_state_cannot_be_changed():
    with fake_rank(0, 2):
        state = initialize_model_parallel(2)
        with pytest.raises(AttributeError):
            state.rank = 1
