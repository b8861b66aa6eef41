"""`parallel_state` answers as Megatron's sources do: every function, every rank, many worlds."""

import random
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.fake_world import each_rank, fake_rank, pretend
from tests.on_ranks import equal_on_all, on_ranks
from tests.oracle import Classic, all_settings, listed
from tpkernels import create_parallel_state, plan_groups
from tpkernels import initialize_model_parallel as ours
from tpkernels import parallel_state as ps
from tpkernels.groups.random import get_rng_tracker, manual_seed
from tpkernels.groups.state import ParallelStateError, overwritten, use

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


# The early sources' functions, against the oracle.


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


@pytest.mark.parametrize(("world", "tp", "pp", "split"), [(1, 1, 1, None), (8, 2, 2, None), (16, 2, 4, 2)])
def test_embedding_groups_hold_the_oracles_ranks(world, tp, pp, split):
    for rank in each_rank(world):
        ps.initialize_model_parallel(tp, pp, None, split)
        oracle = Classic(world, tp, pp, None, split, rank)
        for kind in ("embedding", "position_embedding"):
            getter, ranks = getattr(ps, f"get_{kind}_group"), getattr(oracle, kind)()
            if rank in ranks:
                assert dist.get_process_group_ranks(getter()) == ranks
            else:
                with pytest.raises(ParallelStateError, match=f"on rank {rank}: it is pipeline"):
                    getter()


def test_every_name_of_megatrons_early_sources_is_public():
    names = {function for function, *_ in Classic(4, 2, 2, 2, None, 0).answers(0)}
    names |= {f"set_{name}" for name in SETTABLE}
    assert names | {"initialize_model_parallel", "destroy_model_parallel"} <= set(ps.__all__)
    assert len(set(ps.__all__)) == len(ps.__all__)


ASKS_FOR_STATE = [
    name
    for name in ps.__all__
    if name.startswith(("get_", "is_"))
    and "virtual" not in name  # None before initialization, as in Megatron
    and name not in ("is_initialized", "get_pipeline_model_parallel_split_rank")
]


@pytest.mark.parametrize("name", ASKS_FOR_STATE)
def test_asking_before_initialization_is_an_error_of_both_kinds(name):
    for caught in (RuntimeError, AssertionError):
        with pytest.raises(caught, match=r"is not initialized: call initialize_model_parallel"):
            getattr(ps, name)()


@pytest.mark.parametrize(
    ("getter", "words"),
    [
        (ps.get_model_parallel_group, "model parallel group"),
        (ps.get_tensor_model_parallel_group, "intra_layer_model parallel group"),
        (ps.get_pipeline_model_parallel_group, "pipeline_model parallel group"),
        (ps.get_data_parallel_group, "data parallel group"),
        (ps.get_embedding_group, "embedding group"),
        (ps.get_position_embedding_group, "position embedding group"),
        (ps.get_data_parallel_src_rank, "Data parallel group"),
        (ps.get_pipeline_model_parallel_first_rank, "Pipeline parallel group"),
    ],
)
def test_asking_before_initialization_keeps_the_familiar_words(getter, words):
    with pytest.raises(ParallelStateError, match=f"^{words} is not initialized"):
        getter()


# Groups of today's Megatron.

DENSE, EXPERTS = ("tp", "cp", "dp", "pp"), ("tp", "ep", "dp", "pp")
GROUPS = {  # get_..._group, and world_size and rank where there are, with arguments: axes, on which grid
    ("model_parallel", ()): (DENSE, ("tp", "pp")),
    ("tensor_model_parallel", ()): (DENSE, ("tp",)),
    ("pipeline_model_parallel", ()): (DENSE, ("pp",)),
    ("context_parallel", ()): (DENSE, ("cp",)),
    ("data_parallel", ()): (DENSE, ("dp",)),
    ("data_parallel", (True,)): (DENSE, ("dp", "cp")),
    ("data_parallel", (True, False, True)): (DENSE, ("dp", "cp")),
    ("tensor_and_context_parallel", ()): (DENSE, ("tp", "cp")),
    ("tensor_and_data_parallel", ()): (DENSE, ("tp", "dp")),
    ("tensor_and_data_parallel", (True, True)): (DENSE, ("tp", "dp", "cp")),
    ("amax_reduction", ()): (DENSE, ("tp", "dp")),
    ("amax_reduction", (True,)): (DENSE, ("tp", "dp", "cp")),
    ("amax_reduction", (False, True)): (DENSE, ("tp",)),
    ("amax_reduction", (True, True)): (DENSE, ("tp", "cp")),
    ("expert_model_parallel", ()): (EXPERTS, ("ep",)),
    ("expert_data_parallel", ()): (EXPERTS, ("dp",)),
    ("expert_data_parallel", (True, False, True)): (EXPERTS, ("dp",)),
    ("expert_tensor_parallel", ()): (EXPERTS, ("tp",)),
    ("expert_tensor_and_model_parallel", ()): (EXPERTS, ("tp", "ep")),
    ("expert_tensor_model_pipeline_parallel", ()): (EXPERTS, ("tp", "ep", "pp")),
    ("expert_tensor_model_pipeline_parallel", (True, True)): (EXPERTS, ("tp", "ep", "pp")),
    ("intra_distributed_optimizer_instance", ()): (DENSE, DENSE),
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


def ranks_of(name, arguments):
    return dist.get_process_group_ranks(getattr(ps, f"get_{name}_group")(*arguments))


@pytest.mark.parametrize(("world", "tensor", "context", "expert", "pipeline"), WORLDS)
def test_groups_hold_the_listed_ranks(world, tensor, context, expert, pipeline):
    dense = {"tp": tensor, "cp": context, "dp": world // (tensor * context * pipeline), "pp": pipeline}
    experts = {"tp": tensor, "ep": expert, "dp": world // (tensor * expert * pipeline), "pp": pipeline}
    sizes = {DENSE: dense, EXPERTS: experts}
    for rank in each_rank(world):
        more = {"context_parallel_size": context, "expert_model_parallel_size": expert}
        ps.initialize_model_parallel(tensor, pipeline, **more)
        for (name, arguments), (grid, along) in GROUPS.items():
            expected = listed(rank, sizes[grid], along)
            assert ranks_of(name, arguments) == expected, (name, arguments)
            if hasattr(ps, f"get_{name}_world_size") and (not arguments or name == "data_parallel"):
                assert getattr(ps, f"get_{name}_world_size")(*arguments) == len(expected), name
                assert getattr(ps, f"get_{name}_rank")(*arguments) == expected.index(rank), name
        assert ps.get_expert_model_parallel_src_rank() == listed(rank, experts, ("ep",))[0]
        assert ps.get_model_parallel_src_rank() == listed(rank, dense, ("tp", "pp"))[0]
        assert ps.get_context_parallel_global_ranks() == listed(rank, dense, ("cp",))
        assert ps.get_gtp_weight_remat_global_ranks() == [rank]
        assert ps.get_expert_gtp_weight_remat_global_ranks() == [rank]
        tp, dp, cp, pp = (listed(rank, dense, (axis,)).index(rank) for axis in ("tp", "dp", "cp", "pp"))
        assert ps.get_all_ranks() == f"{tp}_0_{dp}_{cp}_{pp}_{listed(rank, experts, ('ep',)).index(rank)}"


@on_ranks(4)
def test_groups_move_data():
    ps.initialize_model_parallel(2, 2)
    for name, arguments in GROUPS:
        x = torch.ones(1)
        dist.all_reduce(x, group=getattr(ps, f"get_{name}_group")(*arguments))
        assert x == len(ranks_of(name, arguments)), (name, arguments)
    assert ps.get_data_parallel_group_gloo() is ps.get_data_parallel_group()
    assert ps.get_expert_data_parallel_group_gloo() is ps.get_expert_data_parallel_group()


def test_equal_groups_are_shared_and_a_state_without_combined_ones_says_who_makes_them():
    with fake_rank(3, 8):
        ps.initialize_model_parallel(2)
        assert ps.get_tensor_and_context_parallel_group() is ps.get_tensor_model_parallel_group()
        assert ps.get_tensor_and_data_parallel_group() is dist.group.WORLD
        assert ps.get_expert_tensor_model_pipeline_parallel_group() is ps.get_model_parallel_group()
        ps.destroy_model_parallel()
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
    assert len(TAKE_CHECK) == 22
    names = [name for name in TAKE_CHECK if "hybrid" not in name]
    found = {name: getattr(ps, name)(check_initialized=False) for name in names}
    assert found == dict.fromkeys(names)


def test_groups_that_this_rank_or_this_state_has_not():
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
        for name in ("group", "world_size", "rank"):
            with pytest.raises(ValueError, match="expected with_context_parallel=True"):
                getattr(ps, f"get_data_parallel_{name}")(partial_data_parallel=True)
        with pytest.raises(ParallelStateError, match=r"move CPU tensors by gloo.*cpu:gloo,cuda:nccl"):
            ps.get_data_parallel_group_gloo()


# Virtual stages.


def answers(**said):
    asked = (ps.is_pipeline_first_stage, ps.is_pipeline_last_stage, ps.is_rank_in_embedding_group)
    return [function(**said) for function in asked]


@pytest.mark.parametrize("stage", range(4))
def test_a_virtual_stage_counts_if_it_is_passed_or_was_set(stage):
    """As in Megatron-Core until `vp_stage` came: `ignore_virtual` is False by default."""
    first, last = stage == 0, stage == 3
    with fake_rank(stage, 4):
        ps.initialize_model_parallel(1, 4, 2)
        assert answers(ignore_virtual=True) == [first, last, first or last]
        assert answers(ignore_virtual=True, vp_stage=1) == [first, last, first or last]
        assert answers(ignore_virtual=False, vp_stage=0) == [first, False, first]
        assert answers() == [first, False, first]  # at virtual stage 0, where all start
        assert answers(vp_stage=1) == [False, last, last]
        ps.set_virtual_pipeline_model_parallel_rank(1)
        assert answers() == [False, last, last]
        for wrong in (-1, 2):
            with pytest.raises(ValueError, match=f"expected a virtual stage from 0 to 1, got {wrong}"):
                ps.is_pipeline_first_stage(False, wrong)
        ps.set_virtual_pipeline_model_parallel_world_size(None)
        assert ps.get_virtual_pipeline_model_parallel_world_size() is None
        assert answers() == answers(vp_stage=1) == [first, last, first or last]
        ps.set_virtual_pipeline_model_parallel_world_size(3)
        assert ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=2) == last


# Sizes and ranks that are overwritten.


def change(**values):
    """Overwritten, and got."""
    for name, value in values.items():
        getattr(ps, f"set_{name}")(value)
        assert value is None or getattr(ps, f"get_{name}")() == value


def require_nothing_set():
    assert overwritten() == {}
    assert not ps.model_parallel_is_initialized()
    assert ps.get_virtual_pipeline_model_parallel_rank() is None
    assert ps.get_pipeline_model_parallel_split_rank() is None


@pytest.mark.parametrize(("name", "least"), SETTABLE.items())
def test_what_is_no_size_or_rank_is_refused_on_the_fly(name, least):
    argument = "world_size" if least else "rank"
    for wrong in (least - 1, 1.5, "2", True):
        with pytest.raises((ValueError, TypeError), match=f"{argument} must be"):
            getattr(ps, f"set_{name}")(wrong)
    assert overwritten() == {}


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
        ps.set_pipeline_model_parallel_world_size(16)
        with pytest.raises(ParallelStateError, match="16 on the fly, but this rank's pipeline group has 4"):
            ps.get_pipeline_model_parallel_last_rank()


def test_numbers_of_data_and_experts_are_obeyed_by_random_streams_too():
    plan = plan_groups(world_size=16, tensor=2, expert=2)
    changes = {"data_parallel_rank": 5, "expert_model_parallel_world_size": 8}
    changes |= {"expert_model_parallel_rank": 7, "expert_tensor_parallel_world_size": 4}
    changes |= {"expert_tensor_parallel_rank": 3}
    with fake_rank(0, 16), use(create_parallel_state(plan)):
        change(**changes)
        manual_seed(10)
        with get_rng_tracker().fork("expert-parallel-rng"):
            drawn = torch.rand(1)
        change(**dict.fromkeys(changes))
        assert ps.get_all_ranks() == "0_0_0_0_0_0"
        assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(10 + 1024 + 100 * 7 + 3))


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
        assert not ps.is_pipeline_stage_at_split()  # stage 1
        ps.set_pipeline_model_parallel_split_rank(None)
        assert ps.get_pipeline_model_parallel_split_rank() == 1


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


# initialize_model_parallel


@pytest.mark.parametrize("initialize", [ps.initialize_model_parallel, ours])
@pytest.mark.parametrize("fourth", ["nccl", False, [0, 1]], ids=repr)
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
    given = dict.fromkeys(("pipeline_model_parallel_comm_backend", "sharp_enabled_group"))
    given |= {"use_sharp": False, "hierarchical_context_parallel_sizes": []}
    given |= {"gtp_remat_size": 1, "rank_offset": 0}
    given |= {"num_distributed_optimizer_instances": 1, "expert_tensor_parallel_size": 2}
    given |= {"distributed_timeout_minutes": 30, "create_gloo_process_groups": False}
    with fake_rank(0, 4):
        ps.initialize_model_parallel(2, high_priority_stream_groups=[], **given)
        assert ps.is_initialized()


@on_ranks(2)
def test_ranks_agree_on_megatrons_arguments():
    """Also on those that are not supported, and on who makes the groups."""
    ps.initialize_model_parallel(2, distributed_timeout_minutes=0.5)
    options = ps.get_tensor_model_parallel_group()._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=30)
    ps.destroy_model_parallel()
    rank, make, seconds = dist.get_rank(), ps.initialize_model_parallel, timedelta(seconds=5)
    for words, call in {
        r"ranks disagree.*use_sharp=True": lambda: make(2, use_sharp=rank == 1),
        r"get_embedding_ranks: expected None": lambda: make(2, get_embedding_ranks=lambda ranks: ranks),
        r"rank 0 asked for initialize_model_parallel\(tensor_model_parallel_size=2\), but rank 1 asked for "
        r"parallel_state\.initialize_model": lambda: make(2) if rank else ours(2),
        r"no timeout= with it": lambda: make(2, timeout=seconds, distributed_timeout_minutes=1),
    }.items():
        name, text = equal_on_all(error_of(call))
        assert name in ("ParallelStateError", "InvalidSizes")
        assert re.search(words, text), text
