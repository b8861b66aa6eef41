"""`parallel_state` answers as Megatron's sources do: every function, every rank, many worlds."""

from itertools import product

import pytest
import torch.distributed as dist

from tests.fake_world import each_rank, fake_rank, pretend
from tests.oracle import Classic, all_settings
from tpkernels import parallel_state as ps
from tpkernels.groups.state import ParallelStateError, overwritten, use

GETTERS_OF_GROUPS = {
    "model": ps.get_model_parallel_group,
    "tp": ps.get_tensor_model_parallel_group,
    "pp": ps.get_pipeline_model_parallel_group,
    "dp": ps.get_data_parallel_group,
    "embedding": ps.get_embedding_group,
    "position_embedding": ps.get_position_embedding_group,
}


SETTABLE = {  # on the fly; and the least that makes sense
    "tensor_model_parallel_world_size": 1,
    "pipeline_model_parallel_world_size": 1,
    "tensor_model_parallel_rank": 0,
    "pipeline_model_parallel_rank": 0,
    "pipeline_model_parallel_split_rank": 0,
    "virtual_pipeline_model_parallel_rank": 0,
    "virtual_pipeline_model_parallel_world_size": 1,
    "data_parallel_rank": 0,
    "expert_model_parallel_world_size": 1,
    "expert_model_parallel_rank": 0,
    "expert_tensor_parallel_world_size": 1,
    "expert_tensor_parallel_rank": 0,
}


@pytest.mark.parametrize(
    "world", [1, 2, 3, 4, 6, 8, *(pytest.param(n, marks=pytest.mark.sweep) for n in (12, 16))]
)
@pytest.mark.filterwarnings("ignore:is_.*early sources of Megatron:UserWarning")
def test_every_answer_is_the_oracles_on_every_rank(world):
    compared = 0
    for setting in all_settings((world,)):
        virtual = setting[3]
        for rank in range(world):
            oracle = Classic(*setting, rank)
            with use(pretend(*setting, rank)):
                for virtual_rank in [None] if virtual is None else range(virtual):
                    if virtual_rank is not None:
                        ps.set_virtual_pipeline_model_parallel_rank(virtual_rank)
                    for function, arguments, expected in oracle.answers(virtual_rank):
                        answer = getattr(ps, function)(*arguments)
                        assert answer == expected, (oracle, virtual_rank, function, arguments)
                        compared += 1
    assert compared > 20 * world


@pytest.mark.parametrize(
    ("world", "tp", "pp", "split"), [(1, 1, 1, None), (8, 2, 2, None), (16, 2, 4, 2), (12, 3, 4, 3)]
)
def test_groups_hold_the_oracles_ranks(world, tp, pp, split):
    for rank in each_rank(world):
        ps.initialize_model_parallel(tp, pp, None, split)
        oracle = Classic(world, tp, pp, None, split, rank)
        expected = {kind: oracle.group(kind) for kind in ("model", "tp", "pp", "dp")}
        expected |= {"embedding": oracle.embedding(), "position_embedding": oracle.position_embedding()}
        for kind, getter in GETTERS_OF_GROUPS.items():
            if rank in expected[kind]:
                assert dist.get_process_group_ranks(getter()) == expected[kind]
                assert dist.get_rank(getter()) == expected[kind].index(rank)
            else:
                not_here = f"not initialized on rank {rank}: it is pipeline"
                with pytest.raises(ParallelStateError, match=not_here):
                    getter()


def test_every_name_of_megatrons_sources_is_public():
    names = {function for function, *_ in Classic(4, 2, 2, 2, None, 0).answers(0)}
    names |= {name for name in ps.__all__ if getattr(ps, name) in GETTERS_OF_GROUPS.values()}
    names |= {f"set_{name}" for name in SETTABLE}
    assert names | {"initialize_model_parallel", "destroy_model_parallel"} <= set(ps.__all__)
    assert len(names) >= 36
    assert all(callable(getattr(ps, name)) for name in ps.__all__)
    assert len(set(ps.__all__)) == len(ps.__all__)


ASKS_FOR_STATE = [
    name
    for name in ps.__all__
    if name.startswith(("get_", "is_"))
    and "virtual" not in name  # None before initialization, as in Megatron
    and name != "is_initialized"
    and name != "get_pipeline_model_parallel_split_rank"
]


def test_asking_before_initialization_is_an_error_of_both_kinds():
    for name, caught in product(ASKS_FOR_STATE, (RuntimeError, AssertionError)):
        with pytest.raises(caught, match=r"is not initialized: call initialize_model_parallel"):
            getattr(ps, name)()


def test_asking_before_initialization_keeps_the_familiar_words():
    for getter, words in [
        (ps.get_model_parallel_group, "model parallel group is not initialized"),
        (ps.get_tensor_model_parallel_group, "intra_layer_model parallel group is not initialized"),
        (ps.get_pipeline_model_parallel_group, "pipeline_model parallel group is not initialized"),
        (ps.get_data_parallel_group, "data parallel group is not initialized"),
        (ps.get_embedding_group, "embedding group is not initialized"),
        (ps.get_position_embedding_group, "position embedding group is not initialized"),
        (ps.get_data_parallel_src_rank, "Data parallel group is not initialized"),
        (ps.get_pipeline_model_parallel_first_rank, "Pipeline parallel group is not initialized"),
    ]:
        with pytest.raises(ParallelStateError, match=words):
            getter()


def require_nothing_set():
    assert not ps.model_parallel_is_initialized()
    assert ps.get_virtual_pipeline_model_parallel_rank() is None
    assert ps.get_virtual_pipeline_model_parallel_world_size() is None
    assert ps.get_pipeline_model_parallel_split_rank() is None
    with pytest.raises(ParallelStateError):
        ps.get_tensor_model_parallel_world_size()


def change(**values):
    """Set on the fly, and got."""
    for name, value in values.items():
        getattr(ps, f"set_{name}")(value)
        assert value is None or getattr(ps, f"get_{name}")() == value


def test_sizes_and_ranks_change_on_the_fly():
    changes = {"tensor_model_parallel_world_size": 4, "tensor_model_parallel_rank": 3}
    changes |= {"pipeline_model_parallel_world_size": 2, "pipeline_model_parallel_rank": 1}
    with use(pretend(16, 2, 4, None, None, rank=6)):
        change(**changes)
        assert ps.get_tensor_model_parallel_src_rank() == 4
        assert ps.is_pipeline_last_stage()
        assert ps.get_pipeline_model_parallel_last_rank() == 6  # second of 2, 6, 10, 14
        assert ps.get_pipeline_model_parallel_next_rank() == 2
        change(**dict.fromkeys(changes))
        assert ps.get_tensor_model_parallel_world_size() == 2
        assert ps.get_pipeline_model_parallel_last_rank() == 14


@pytest.mark.parametrize(("name", "least"), SETTABLE.items())
def test_what_is_no_size_or_rank_is_refused_on_the_fly(name, least):
    argument = "world_size" if least else "rank"
    for wrong in (least - 1, 1.5, "2", True):
        with pytest.raises((ValueError, TypeError), match=f"{argument} must be"):
            getattr(ps, f"set_{name}")(wrong)
    assert overwritten() == {}


def test_sizes_set_on_the_fly_need_no_initialization():
    """Checkpoint tools set sizes and ranks to build one rank's model in a lone process."""
    require_nothing_set()
    try:
        change(tensor_model_parallel_world_size=8, tensor_model_parallel_rank=5)
        change(pipeline_model_parallel_world_size=2, pipeline_model_parallel_rank=1)
        assert ps.is_pipeline_last_stage()
        assert not ps.is_pipeline_first_stage()
        with fake_rank(13, 16):
            assert ps.get_tensor_model_parallel_src_rank() == 8
    finally:
        ps.destroy_model_parallel()
    require_nothing_set()


def test_split_rank_set_on_the_fly_is_obeyed():
    with use(pretend(8, 1, 4, None, 1, rank=2)):
        assert not ps.is_pipeline_stage_before_split(1)
        ps.set_pipeline_model_parallel_split_rank(3)
        assert ps.get_pipeline_model_parallel_split_rank() == 3
        assert ps.is_pipeline_stage_before_split(1)
        assert ps.is_pipeline_stage_at_split() is (ps.get_pipeline_model_parallel_rank() == 2)
        ps.set_pipeline_model_parallel_split_rank(None)
        assert ps.get_pipeline_model_parallel_split_rank() == 1


def test_pipeline_size_beyond_the_group_is_a_clear_error():
    with use(pretend(8, 1, 4, None, None, rank=2)):
        ps.set_pipeline_model_parallel_world_size(16)
        too_many = "set to 16 on the fly, but this rank's pipeline group has 4"
        with pytest.raises(ParallelStateError, match=too_many):
            ps.get_pipeline_model_parallel_last_rank()


def test_destroy_clears_everything():
    with fake_rank(5, 8):
        ps.initialize_model_parallel(2, 4, 2, 1)
        ps.set_tensor_model_parallel_world_size(16)
        ps.set_virtual_pipeline_model_parallel_rank(1)
        ps.destroy_model_parallel()
        require_nothing_set()
        ps.initialize_model_parallel(4, 1)
        assert ps.get_tensor_model_parallel_world_size() == 4
        assert ps.get_virtual_pipeline_model_parallel_world_size() is None
