"""Groups of Megatron's that move data, and layers and states made of them."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.fake_world import fake_rank
from tests.interop.megatron_core.megatrons_groups import GETTERS
from tests.on_ranks import equal_on_all, on_ranks
from tpkernels import ParallelMLP, destroy_parallel_state, manual_seed, parallel_state
from tpkernels.groups.initialize import Listed, create_listed_groups, initialize_model_parallel
from tpkernels.groups.state import ParallelStateError, current, use
from tpkernels.interop.megatron_core import parallel_state as ps
from tpkernels.interop.megatron_core.groups import KINDS_BY_NAME, from_megatron
from tpkernels.layers.world import tensor_world


def total(group):
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    return x.item()


@on_ranks(4)
def test_every_group_adds_up_its_ranks():
    """Initialized twice, with other sizes between."""
    for sizes in ((2, 2), (1, 4), (2, 1)):
        ps.initialize_model_parallel(*sizes, create_all_gather_group=True)
        for name, arguments in GETTERS:
            group = getattr(ps, name)(**arguments)
            if group is not None:
                assert total(group) == sum(dist.get_process_group_ranks(group)), (sizes, name, arguments)
        data, twin = ps.get_data_parallel_group(True), ps.get_data_parallel_group(True, False, True)
        assert total(twin) == total(data)
        assert twin is not data
        assert ps.get_data_parallel_group_gloo(True) is data
        ps.destroy_model_parallel()


@on_ranks(4)
def test_groups_are_made_by_their_members_alone():
    """Members that have made different groups before meet all the same; others need not call."""
    rank = dist.get_rank()
    if rank == 1:
        create_listed_groups({"alone": Listed([[1]])})
    middle = create_listed_groups({"middle": Listed([[1, 2]])}) if rank in (1, 2) else {}
    outside = create_listed_groups({"outside": Listed([[0, 3]])})
    assert [total(group) for group in (*middle.values(), *outside.values())] == [3.0]


@on_ranks(4)
def test_lists_that_overlap_leave_the_world_or_differ_are_refused_on_all_ranks():
    rank = dist.get_rank()
    calls = {
        "create_all_gather_group=True": lambda: ps.initialize_model_parallel(
            2, create_all_gather_group=rank == 3
        ),
        "no rank in common": lambda: create_listed_groups({"a": Listed([[0, 1], [1, 2, 3]])}),
        "ranks 0 to 3": lambda: create_listed_groups({"b": Listed([[0, 1, 2, 3, 4]])}),
        "ranks disagree": lambda: create_listed_groups(
            {"c": Listed([[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]])}
        ),
    }
    for words, call in calls.items():
        assert words in equal_on_all(error_of(call))[1]


def mlp_of(state):
    manual_seed(5)
    mlp = ParallelMLP(8, 16, activation="gelu", state=state)
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    y, _ = mlp(x)
    y.square().sum().backward()
    return [float(y.detach().sum()), float(x.grad.sum())]


class Stands:
    """For a group of Megatron's."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_take_groups_that_are_passed_and_what_stands_for_a_group_of_one(ranks, request):
    for state, *others in request.getfixturevalue(f"ranks{ranks}").run(mlps_of_what_is_passed):
        assert others == [state] * (5 if ranks == 1 else 3)


def mlps_of_what_is_passed():
    """Numbers by the current state, a collection, the group, a state of the collection, and stand-ins."""
    ps.initialize_model_parallel(dist.get_world_size())
    collection = SimpleNamespace(tp=ps.get_tensor_model_parallel_group(), dp=ps.get_data_parallel_group())
    states = [None, collection, collection.tp, from_megatron(collection)]
    if dist.get_world_size() == 1:
        states += [Stands(0, 1), SimpleNamespace(tp=Stands(0, 1))]
    return [mlp_of(state) for state in states]


def adopted():
    """tpkernels says of groups that Megatron has made what Megatron says."""
    theirs = import_module("megatron.core.parallel_state")
    with pytest.raises(ParallelStateError, match=r"megatron\.core\.parallel_state is not initialized"):
        from_megatron()
    theirs.initialize_model_parallel(2, 2)
    state, group = from_megatron(), theirs.get_tensor_model_parallel_group()
    with use(state):
        assert current() is state
        assert parallel_state.get_tensor_model_parallel_rank() == theirs.get_tensor_model_parallel_rank()
        assert state.plan.stage_of(state.rank) == theirs.get_pipeline_model_parallel_rank()
        assert state.is_member("embedding") == theirs.is_rank_in_embedding_group()
        assert state.is_member("position_embedding") == theirs.is_rank_in_position_embedding_group()
        assert state.ranks("tp_dp") == tuple(range(state.rank // 2 * 2, state.rank // 2 * 2 + 2))
        assert state.process_group("tp") is group
        assert mlp_of(None) == mlp_of(group)
    destroy_parallel_state(state)
    assert total(group) > 0  # they stay Megatron's
    theirs.destroy_model_parallel()


def test_groups_of_megatrons_are_adopted(ranks4):
    pytest.importorskip("megatron.core", reason="needs megatron-core, to make groups")
    ranks4.run(adopted)


def test_what_stands_for_a_group_of_more_holds_weights_and_says_so():
    world = tensor_world(Stands(1, 2))
    assert (world.rank, world.size, world.ranks) == (1, 2, ())
    with pytest.raises(
        ParallelStateError, match=r"was given by Stands, which is no process group: a layer may"
    ):
        _ = world.group
    with pytest.raises(ValueError, match=r"rank\(\) below size\(\) 2, got 2"):
        tensor_world(Stands(2, 2))


def test_a_state_of_some_of_megatrons_groups_knows_those():
    with fake_rank(1, 4):
        initialize_model_parallel(2)
        state = from_megatron(SimpleNamespace(tp=current().process_group("tp"), embd=None))
        assert (state.rank_in("tp"), state.is_member("embedding")) == (1, False)
        with pytest.raises(ParallelStateError, match="Megatron's dp group is not known"):
            state.size("dp")
        with pytest.raises(ParallelStateError, match="expected a tensor-parallel group"):
            from_megatron(SimpleNamespace())
        with pytest.raises(TypeError, match="an object with such a group `tp`"):
            tensor_world(SimpleNamespace())


def test_names_of_groups_are_megatrons():
    config = pytest.importorskip("megatron.core.process_groups_config", reason="needs megatron-core")
    assert KINDS_BY_NAME.keys() <= config.ProcessGroupCollection.__dataclass_fields__.keys()
