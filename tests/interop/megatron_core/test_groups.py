"""Groups of Megatron's that move data, and layers and states made of them."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.fake_world import fake_rank
from tests.interop.megatron_core.megatrons_groups import GETTERS
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


def sums():
    """Whether every group of Megatron's adds up its ranks; initialized twice, with other sizes between."""
    found = {}
    for sizes in ((2, 2), (1, 4), (2, 1)):
        ps.initialize_model_parallel(*sizes, create_all_gather_group=True)
        for name, arguments in GETTERS:
            group = getattr(ps, name)(**arguments)
            if group is not None:
                ranks = dist.get_process_group_ranks(group)
                found[f"{sizes} {name} {arguments}"] = total(group) == sum(ranks)
        twin = ps.get_data_parallel_group(True, independent_all_gather=True)
        found[f"{sizes} twin"] = total(twin) == total(ps.get_data_parallel_group(True))
        found[f"{sizes} other"] = twin is not ps.get_data_parallel_group(True)
        found[f"{sizes} gloo"] = ps.get_data_parallel_group_gloo(True) is ps.get_data_parallel_group(True)
        ps.destroy_model_parallel()
    return found


def uneven_history():
    """Members that have made different groups before meet all the same; others need not call."""
    rank = dist.get_rank()
    if rank == 1:
        create_listed_groups({"alone": Listed([[1]])})
    middle = create_listed_groups({"middle": Listed([[1, 2]])}) if rank in (1, 2) else {}
    outside = create_listed_groups({"outside": Listed([[0, 3]])})
    return [total(group) for group in (*middle.values(), *outside.values())]


def refusals():
    lists = {"a": Listed([[0, 1], [1, 2, 3]])}, {"b": Listed([[0, 1, 2, 3, 4]])}
    differs = {"c": Listed([[0, 1], [2, 3]] if dist.get_rank() else [[0, 2], [1, 3]])}
    by_rank_3 = dist.get_rank() == 3
    return [
        error_of(ps.initialize_model_parallel, 2, create_all_gather_group=by_rank_3),
        *(error_of(create_listed_groups, each) for each in (*lists, differs)),
    ]


def reference_mlp(state):
    mlp = ParallelMLP(8, 16, activation="gelu", state=state)
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    y = mlp(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return [float(y.detach().sum()), float(x.grad.sum())]


class Stands:
    """For a group of Megatron's."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def mlps_of_what_is_passed():
    """The same numbers by a collection, by one of Megatron's kind, by the group, by the current state."""
    ps.initialize_model_parallel(dist.get_world_size())
    collection = SimpleNamespace(tp=ps.get_tensor_model_parallel_group(), dp=ps.get_data_parallel_group())
    states = [None, collection, collection.tp, from_megatron(collection)]
    if dist.get_world_size() == 1:
        states += [Stands(0, 1), SimpleNamespace(tp=Stands(0, 1))]
    found = []
    for state in states:
        manual_seed(5)
        found.append(reference_mlp(state))
    return found


def adopted():
    """What tpkernels says of groups that Megatron has made, and Megatron of the same."""
    theirs = import_module("megatron.core.parallel_state")
    before = error_of(from_megatron)
    theirs.initialize_model_parallel(2, 2)
    state = from_megatron()
    with use(state):
        manual_seed(3)
        found = {
            "tensor rank": tuple(each.get_tensor_model_parallel_rank() for each in (parallel_state, theirs)),
            "stage": (state.plan.stage_of(state.rank), theirs.get_pipeline_model_parallel_rank()),
            "embedding": (state.is_member("embedding"), theirs.is_rank_in_embedding_group()),
            "position": (state.is_member("position_embedding"), theirs.is_rank_in_position_embedding_group()),
            "tp_dp": (state.ranks("tp_dp"), tuple(range(state.rank // 2 * 2, state.rank // 2 * 2 + 2))),
            "group": (state.process_group("tp") is theirs.get_tensor_model_parallel_group(), True),
            "mlp": (reference_mlp(None), reference_mlp(theirs.get_tensor_model_parallel_group())),
        }
        found["mlp"] = (len(found["mlp"][0]), len(found["mlp"][1]))
        found["current"] = (current() is state, True)
    destroy_parallel_state(state)
    found["alive"] = (total(theirs.get_tensor_model_parallel_group()) > 0, True)
    found["before"] = (before[0], "ParallelStateError")
    theirs.destroy_model_parallel()
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def test_every_group_adds_up_its_ranks(ranks4):
    for found in ranks4.run(sums):
        assert [name for name, right in found.items() if not right] == []


def test_groups_are_made_by_their_members_alone(ranks4):
    assert ranks4.run(uneven_history) == [[3.0]] * 4


def test_lists_that_overlap_leave_the_world_or_differ_are_refused_on_all_ranks(ranks4):
    for disagreeing, overlapping, outside, differing in ranks4.run(refusals):
        assert disagreeing[0] == differing[0] == "ParallelStateError"
        assert "create_all_gather_group=True" in disagreeing[1]
        assert overlapping[0] == outside[0] == "InvalidSizes"
        assert "no rank in common" in overlapping[1]
        assert "ranks 0 to 3" in outside[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_take_groups_that_are_passed_and_what_stands_for_a_group_of_one(ranks, request):
    for state, *others in request.getfixturevalue(f"ranks{ranks}").run(mlps_of_what_is_passed):
        assert others == [state] * (5 if ranks == 1 else 3)


def test_groups_of_megatrons_are_adopted(ranks4):
    pytest.importorskip("megatron.core", reason="needs megatron-core, to make groups")
    assert ranks4.run(adopted) == [{}] * 4


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
        adopted = from_megatron(SimpleNamespace(tp=current().process_group("tp"), embd=None))
        assert (adopted.rank_in("tp"), adopted.is_member("embedding")) == (1, False)
        with pytest.raises(ParallelStateError, match="Megatron's dp group is not known"):
            adopted.size("dp")
        with pytest.raises(ParallelStateError, match="expected a tensor-parallel group"):
            from_megatron(SimpleNamespace())
        with pytest.raises(TypeError, match="an object with such a group `tp`"):
            tensor_world(SimpleNamespace())


def test_names_of_groups_are_megatrons():
    config = pytest.importorskip("megatron.core.process_groups_config", reason="needs megatron-core")
    assert KINDS_BY_NAME.keys() <= config.ProcessGroupCollection.__dataclass_fields__.keys()
