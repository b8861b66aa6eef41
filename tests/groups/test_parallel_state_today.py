"""What `parallel_state` has of today's Megatron beyond the early sources, and where both differ."""

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.fake_world import each_rank, fake_rank
from tests.oracle import listed
from tpkernels import create_parallel_state, plan_groups
from tpkernels import initialize_model_parallel as ours
from tpkernels import parallel_state as ps
from tpkernels.groups.random import get_rng_tracker, manual_seed
from tpkernels.groups.state import ParallelStateError, use

DENSE, EXPERTS = ("tp", "cp", "dp", "pp"), ("tp", "ep", "dp", "pp")
GROUPS = {  # getter of a group, with arguments: axes, on which grid
    (ps.get_context_parallel_group, ()): (DENSE, ("cp",)),
    (ps.get_data_parallel_group, (True,)): (DENSE, ("dp", "cp")),
    (ps.get_data_parallel_group, (True, False, True)): (DENSE, ("dp", "cp")),
    (ps.get_tensor_and_context_parallel_group, ()): (DENSE, ("tp", "cp")),
    (ps.get_tensor_and_data_parallel_group, ()): (DENSE, ("tp", "dp")),
    (ps.get_tensor_and_data_parallel_group, (True, True)): (DENSE, ("tp", "dp", "cp")),
    (ps.get_amax_reduction_group, ()): (DENSE, ("tp", "dp")),
    (ps.get_amax_reduction_group, (True,)): (DENSE, ("tp", "dp", "cp")),
    (ps.get_amax_reduction_group, (False, True)): (DENSE, ("tp",)),
    (ps.get_amax_reduction_group, (True, True)): (DENSE, ("tp", "cp")),
    (ps.get_expert_model_parallel_group, ()): (EXPERTS, ("ep",)),
    (ps.get_expert_data_parallel_group, ()): (EXPERTS, ("dp",)),
    (ps.get_expert_data_parallel_group, (True, False, True)): (EXPERTS, ("dp",)),
    (ps.get_expert_tensor_parallel_group, ()): (EXPERTS, ("tp",)),
    (ps.get_expert_tensor_and_model_parallel_group, ()): (EXPERTS, ("tp", "ep")),
    (ps.get_expert_tensor_model_pipeline_parallel_group, ()): (EXPERTS, ("tp", "ep", "pp")),
    (ps.get_expert_tensor_model_pipeline_parallel_group, (True, True)): (EXPERTS, ("tp", "ep", "pp")),
    (ps.get_intra_distributed_optimizer_instance_group, ()): (DENSE, DENSE),
    (ps.get_gtp_weight_remat_group, ()): (DENSE, ()),
    (ps.get_expert_gtp_weight_remat_group, ()): (DENSE, ()),
}
MEASURES = {  # get_..._world_size and get_..._rank, with arguments: axes, on which grid
    ("context_parallel", ()): (DENSE, ("cp",)),
    ("data_parallel", ()): (DENSE, ("dp",)),
    ("data_parallel", (True,)): (DENSE, ("dp", "cp")),
    ("tensor_and_context_parallel", ()): (DENSE, ("tp", "cp")),
    ("expert_model_parallel", ()): (EXPERTS, ("ep",)),
    ("expert_tensor_parallel", ()): (EXPERTS, ("tp",)),
    ("expert_tensor_and_model_parallel", ()): (EXPERTS, ("tp", "ep")),
    ("expert_data_parallel", ()): (EXPERTS, ("dp",)),
    ("gtp_weight_remat", ()): (DENSE, ()),
    ("expert_gtp_weight_remat", ()): (DENSE, ()),
}


WORLDS = [  # world, tensor, context, expert, pipeline
    (1, 1, 1, 1, 1),
    (8, 2, 2, 1, 2),
    (8, 2, 1, 2, 2),
    (16, 2, 2, 4, 2),
    (12, 1, 3, 2, 2),
    (24, 2, 2, 3, 2),
]


@pytest.mark.parametrize(("world", "tensor", "context", "expert", "pipeline"), WORLDS)
def test_combined_groups_hold_the_listed_ranks(world, tensor, context, expert, pipeline):
    dense = {"tp": tensor, "cp": context, "dp": world // (tensor * context * pipeline), "pp": pipeline}
    experts = {"tp": tensor, "ep": expert, "dp": world // (tensor * expert * pipeline), "pp": pipeline}
    sizes = {DENSE: dense, EXPERTS: experts}
    for rank in each_rank(world):
        ps.initialize_model_parallel(
            tensor, pipeline, context_parallel_size=context, expert_model_parallel_size=expert
        )
        ranks = {
            each: listed(rank, sizes[grid], along) for each, (grid, along) in (GROUPS | MEASURES).items()
        }
        for (getter, arguments), expected in ranks.items():
            if callable(getter):
                assert dist.get_process_group_ranks(getter(*arguments)) == expected, (getter, arguments)
            else:
                place = expected.index(rank)
                assert getattr(ps, f"get_{getter}_world_size")(*arguments) == len(expected), getter
                assert getattr(ps, f"get_{getter}_rank")(*arguments) == place, getter
        assert ps.get_expert_model_parallel_src_rank() == listed(rank, experts, ("ep",))[0]
        assert ps.get_data_parallel_src_rank() == listed(rank, dense, ("dp",))[0]
        assert ps.get_model_parallel_src_rank() == listed(rank, dense, ("tp", "pp"))[0]
        assert ps.get_context_parallel_global_ranks() == listed(rank, dense, ("cp",))
        assert ps.get_gtp_weight_remat_global_ranks() == [rank]
        assert ps.get_expert_gtp_weight_remat_global_ranks() == [rank]
        tp, dp, cp, pp = (listed(rank, dense, (axis,)).index(rank) for axis in ("tp", "dp", "cp", "pp"))
        assert ps.get_all_ranks() == f"{tp}_0_{dp}_{cp}_{pp}_{listed(rank, experts, ('ep',)).index(rank)}"


def sums() -> list[float]:
    """Every combined group moves data."""
    ps.initialize_model_parallel(2, 2)
    found = []
    for getter, arguments in GROUPS:
        x = torch.ones(1)
        dist.all_reduce(x, group=getter(*arguments))
        found.append(float(x) - getter(*arguments).size())
    assert ps.get_data_parallel_group_gloo() is ps.get_data_parallel_group()
    assert ps.get_expert_data_parallel_group_gloo() is ps.get_expert_data_parallel_group()
    return found


def test_combined_groups_move_data(ranks4):
    assert ranks4.run(sums) == [[0.0] * len(GROUPS)] * 4


def test_equal_groups_are_shared_with_combined_ones():
    with fake_rank(3, 8):
        ps.initialize_model_parallel(2)
        assert ps.get_tensor_and_context_parallel_group() is ps.get_tensor_model_parallel_group()
        assert ps.get_tensor_and_data_parallel_group() is dist.group.WORLD
        assert ps.get_expert_tensor_model_pipeline_parallel_group() is ps.get_model_parallel_group()


def test_a_state_without_combined_groups_says_who_makes_them():
    with fake_rank(3, 8):
        ours(2, 2)
        assert ps.get_expert_tensor_parallel_world_size() == 2
        with pytest.raises(ParallelStateError, match=r"made by tpkernels\.parallel_state\.initialize_model"):
            ps.get_tensor_and_data_parallel_group()


TAKE_CHECK = [
    name
    for name in ps.__all__
    if name.startswith("get_") and "check_initialized" in getattr(ps, name).__annotations__
]


def test_unchecked_getters_find_none_before_initialization():
    names = [name for name in TAKE_CHECK if "hybrid" not in name]
    found = {name: getattr(ps, name)(check_initialized=False) for name in names}
    assert found == dict.fromkeys(names)


def test_unchecked_getters_find_none_where_this_rank_is_no_member():
    assert len(TAKE_CHECK) == 22
    with fake_rank(2, 4):
        ps.initialize_model_parallel(1, 4)
        assert ps.get_embedding_group(check_initialized=False) is None
        assert ps.get_position_embedding_group(False) is None
        for name in ("inter_distributed_optimizer_instance_group", "hierarchical_context_parallel_groups"):
            missing = getattr(ps, f"get_{name}")
            assert missing(check_initialized=False) is None
            with pytest.raises(ParallelStateError, match="it is not supported"):
                missing()
        assert ps.get_hybrid_data_context_parallel_groups(group_size=1) is ps.get_data_parallel_group(True)
        with pytest.raises(ParallelStateError, match="of 2 ranks do not exist"):
            ps.get_hybrid_data_context_parallel_groups(group_size=2)


def test_part_of_the_data_ranks_needs_context():
    with fake_rank(0, 2):
        ps.initialize_model_parallel()
        for name in ("group", "world_size", "rank"):
            getter = getattr(ps, f"get_data_parallel_{name}")
            with pytest.raises(ValueError, match="expected with_context_parallel=True"):
                getter(partial_data_parallel=True)


def test_a_group_without_gloo_has_no_twin_with_it():
    with fake_rank(0, 2):
        ps.initialize_model_parallel()
        no_gloo = r"does not move CPU tensors by gloo.*cpu:gloo,cuda:nccl"
        with pytest.raises(ParallelStateError, match=no_gloo):
            ps.get_data_parallel_group_gloo()


# What is asked about a virtual pipeline, and what is meant by it.

ASKED = (ps.is_pipeline_first_stage, ps.is_pipeline_last_stage, ps.is_rank_in_embedding_group)


def answers(**said) -> list[bool]:
    return [function(**said) for function in ASKED]


@pytest.fixture(params=range(4), ids=lambda rank: f"stage {rank}")
def stage(request):
    with fake_rank(request.param, 4):
        ps.initialize_model_parallel(1, 4, 2)
        yield request.param


def test_a_virtual_stage_counts_if_it_is_said_so(stage):
    first, last = stage == 0, stage == 3
    assert answers(ignore_virtual=True) == [first, last, first or last]
    assert answers(ignore_virtual=True, vp_stage=1) == [first, last, first or last]
    assert answers(ignore_virtual=False, vp_stage=0) == [first, False, first]
    assert answers(ignore_virtual=False, vp_stage=1) == [False, last, last]
    assert answers(ignore_virtual=False) == [first, False, first]  # at virtual stage 0, where all start


def test_the_virtual_stage_that_was_set_counts_where_nothing_is_said(stage):
    """As in Megatron-Core until `vp_stage` came: `ignore_virtual` is False by default."""
    first, last = stage == 0, stage == 3
    assert answers() == [first, False, first]  # all start at virtual stage 0
    assert answers(vp_stage=1) == [False, last, last]
    ps.set_virtual_pipeline_model_parallel_rank(1)
    assert answers() == [False, last, last]


def test_a_virtual_stage_that_does_not_exist_is_refused(stage):
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=f"vp_stage: expected a virtual stage from 0 to 1, got {wrong}"):
            ps.is_pipeline_first_stage(False, wrong)


def test_without_a_virtual_pipeline_nothing_has_to_be_said():
    with fake_rank(3, 4):
        ps.initialize_model_parallel(1, 4, 2)
        ps.set_virtual_pipeline_model_parallel_world_size(None)
        assert ps.get_virtual_pipeline_model_parallel_world_size() is None
        assert answers() == answers(vp_stage=1) == [False, True, True]
        ps.set_virtual_pipeline_model_parallel_world_size(3)
        assert ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=2)


# What is set on the fly.


def test_what_is_set_of_data_and_experts_is_obeyed():
    plan = plan_groups(world_size=16, tensor=2, expert=2)
    with fake_rank(0, 16), use(create_parallel_state(plan)):
        changes = {
            "data_parallel_rank": 5,
            "expert_model_parallel_world_size": 8,
            "expert_model_parallel_rank": 7,
            "expert_tensor_parallel_world_size": 4,
            "expert_tensor_parallel_rank": 3,
        }
        for name, value in changes.items():
            before = getattr(ps, f"get_{name}")()
            getattr(ps, f"set_{name}")(value)
            assert getattr(ps, f"get_{name}")() == value != before
        manual_seed(10)
        with get_rng_tracker().fork("expert-parallel-rng"):
            drawn = random_number()
        for name in changes:
            getattr(ps, f"set_{name}")(None)
        assert ps.get_all_ranks() == "0_0_0_0_0_0"
        assert drawn == random_number(10 + 1024 + 100 * 7 + 3)


def random_number(seed: int | None = None) -> float:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return float(torch.rand(1, generator=generator))


# initialize_model_parallel


@pytest.mark.parametrize("initialize", [ps.initialize_model_parallel, ours])
@pytest.mark.parametrize("fourth", ["nccl", "ucc", False, True, [0, 1]], ids=repr)
def test_a_fourth_argument_of_todays_megatron_is_refused(initialize, fourth):
    with fake_rank(0, 4):
        with pytest.raises(TypeError, match=r"pipeline_model_parallel_split_rank.*parallel_comm_backend"):
            initialize(1, 2, None, fourth)
        with pytest.raises(TypeError, match="positional arguments"):
            initialize(1, 2, None, None, False)


UNSUPPORTED = {
    "pipeline_model_parallel_comm_backend": "ucc",
    "use_sharp": True,
    "sharp_enabled_group": "dp",
    "hierarchical_context_parallel_sizes": [2, 2],
    "hybrid_context_parallel": True,
    "gtp_remat_size": 2,
    "expert_gtp_remat_size": 0,
    "num_distributed_optimizer_instances": 2,
    "nccl_communicator_config_path": "nccl.yaml",
    "high_priority_stream_groups": ["tp"],
    "get_embedding_ranks": lambda ranks: ranks,
    "get_position_embedding_ranks": random.Random().sample,
    "rank_offset": 4,
    "local_world_size": 2,
    "expert_tensor_parallel_size": 1,
    "distributed_timeout_minutes": 0,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_arguments_of_megatrons_that_are_not_supported_are_refused(name):
    with fake_rank(0, 4), pytest.raises(ValueError, match=f"{name}: expected .*, got "):
        ps.initialize_model_parallel(2, **{name: UNSUPPORTED[name]})


def test_megatrons_own_defaults_are_taken():
    with fake_rank(0, 4):
        ps.initialize_model_parallel(
            2,
            pipeline_model_parallel_comm_backend=None,
            use_sharp=False,
            sharp_enabled_group=None,
            hierarchical_context_parallel_sizes=[],
            gtp_remat_size=1,
            num_distributed_optimizer_instances=1,
            expert_tensor_parallel_size=2,
            distributed_timeout_minutes=30,
            create_gloo_process_groups=False,
            high_priority_stream_groups=[],
            rank_offset=0,
        )
        assert ps.is_initialized()


def limits() -> list[object]:
    """Time-outs of groups, and what ranks are told that ask for different ones, or for what is not there."""
    ps.initialize_model_parallel(2, distributed_timeout_minutes=0.5)
    options = ps.get_tensor_model_parallel_group()._get_backend(torch.device("cpu")).options
    ps.destroy_model_parallel()
    rank = dist.get_rank()
    calls = [
        lambda: ps.initialize_model_parallel(2, use_sharp=rank == 1),
        lambda: ps.initialize_model_parallel(2, get_embedding_ranks=lambda ranks: ranks),
        lambda: ps.initialize_model_parallel(2) if rank else ours(2),
        lambda: ps.initialize_model_parallel(2, timeout=timedelta(seconds=5), distributed_timeout_minutes=1),
    ]
    return [options._timeout, *map(error_of, calls)]


def test_ranks_agree_on_megatrons_arguments(ranks2):
    first, second = ranks2.run(limits)
    assert first == second
    assert first[0] == timedelta(seconds=30)
    assert "ranks disagree" in first[1][1]
    assert "use_sharp=True" in first[1][1]
    assert "get_embedding_ranks: expected None" in first[2][1]
    assert "rank 0 asked for initialize_model_parallel(tensor_model_parallel_size=2), but" in first[3][1]
    assert "rank 1 asked for parallel_state.initialize_model_parallel(tensor_mod" in first[3][1]
    assert "no timeout= with it" in first[4][1]
