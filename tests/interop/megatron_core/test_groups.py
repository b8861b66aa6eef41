"""Groups, collections and grids of ranks that move data."""

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
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.groups.state import ParallelStateError, current, use
from tpkernels.interop.megatron_core import parallel_state as ps
from tpkernels.interop.megatron_core.grid import HyperCommGrid
from tpkernels.interop.megatron_core.groups import ProcessGroupCollection, from_megatron
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


def two_grids():
    """Ranks 0 and 1 on one grid, 2 and 3 on another, each making its groups without the other."""
    own = dist.get_rank() // 2
    grid = HyperCommGrid([1, 2], ["tp", "dp"], rank_offset=2 * own)
    for _ in range(own):  # the second grid's ranks make more groups
        grid.create_pg("tp")
    data = grid.create_pg("dp")
    other = HyperCommGrid([2], ["tp"], rank_offset=2 - 2 * own).create_pg("tp")  # not this rank's
    again = error_of(grid.create_pg, ["dp"])
    both = grid.create_pg(["dp", "tp"]) if own else None
    found = [dist.get_process_group_ranks(data), total(data), other, grid.get_pg("dp") is data, again[0]]
    found += [both and dist.get_process_group_ranks(both), error_of(grid.get_pg, "pp")[0]]
    grid.destroy()
    return [*found, error_of(grid.get_pg, "dp")[0]]


def uneven_history():
    """Members that have made different groups before meet all the same."""
    rank = dist.get_rank()
    if rank == 1:
        ps.create_group([1])
    group = ps.create_group([1, 2]) if rank in (1, 2) else None
    everyone = ps.create_group(group_desc="all")
    outside = ps.create_group([0, 3])
    inner, _ = ps.create_hierarchical_groups(rank, range(4), [2, 2], group_desc="levels")
    return [
        total(group) if group else -1.0,
        total(everyone),
        total(outside) if rank in (0, 3) else float(outside is dist.GroupMember.NON_GROUP_MEMBER),
        total(inner[0]),
        total(inner[1]),
    ]


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
    collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp"])
    states = [None, collection, SimpleNamespace(tp=collection.tp), collection.tp, from_megatron(collection)]
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


def test_grids_beside_each_other_make_groups_without_each_other(ranks4):
    found = ranks4.run(two_grids)
    assert [each[0] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each[1] for each in found] == [1.0, 1.0, 5.0, 5.0]
    assert [each[2:5] for each in found] == [[None, True, "KeyError"]] * 4
    assert [each[5] for each in found] == [None, None, [2, 3], [2, 3]]
    assert [each[6:] for each in found] == [["ValueError", "KeyError"]] * 4


def test_groups_are_made_by_their_members_alone(ranks4):
    assert ranks4.run(uneven_history) == [
        [-1.0, 6.0, 3.0, 1.0, 2.0],
        [3.0, 6.0, 1.0, 1.0, 4.0],
        [3.0, 6.0, 1.0, 5.0, 2.0],
        [-1.0, 6.0, 3.0, 5.0, 4.0],
    ]


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
        assert others == [state] * (6 if ranks == 1 else 4)


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


def test_collections_refuse_unknown_names_and_say_what_they_hold():
    with fake_rank(1, 4):
        initialize_model_parallel(2)
        group = current().process_group("tp")
        collection = ProcessGroupCollection(tp=group, embd=None, hcp=[group])
        assert repr(collection) == "ProcessGroupCollection(tp(2), embd(None), hcp([2]))"
        assert not hasattr(collection, "dp")
        with pytest.raises(ValueError, match="no group is called 'xp'"):
            ProcessGroupCollection(xp=group)
        with pytest.raises(ValueError, match=r"no groups are called \['xp'\]"):
            ProcessGroupCollection.use_mpu_process_groups(["tp", "xp"])
        adopted = from_megatron(collection)
        assert (adopted.rank_in("tp"), adopted.is_member("embedding")) == (1, False)
        with pytest.raises(ParallelStateError, match="Megatron's dp group is not known"):
            adopted.size("dp")
        with pytest.raises(ParallelStateError, match="expected a tensor-parallel group"):
            from_megatron(ProcessGroupCollection())
        with pytest.raises(TypeError, match="an object with such a group `tp`"):
            tensor_world(ProcessGroupCollection())


def test_fields_of_a_collection_are_megatrons():
    config = pytest.importorskip("megatron.core.process_groups_config", reason="needs megatron-core")
    ours = list(ProcessGroupCollection.__dataclass_fields__)
    assert ours == list(config.ProcessGroupCollection.__dataclass_fields__)


def test_a_grid_lists_ranks_from_its_offset():
    with fake_rank(0, 16):
        grid = HyperCommGrid([2, 2, 3], ["tp", "cp", "dp"], rank_offset=4)
        assert grid.get_rank_enum("tp") == [[4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
        assert grid.get_rank_enum(["cp", "tp"]) == grid.get_rank_enum(["tp", "cp"])
        assert grid.get_rank_enum(["tp", "dp"])[1] == [6, 7, 10, 11, 14, 15]
        assert (grid.create_pg("tp"), grid.get_pg(["tp"])) == (None, None)
        for wrong in ("pp", ["tp", "tp"], []):
            with pytest.raises(ValueError, match="dims: expected some of"):
                grid.create_pg(wrong)
        with pytest.raises(InvalidSizes, match="has 24 ranks, but from rank 0 on the world of 16 has 16"):
            HyperCommGrid([2, 12], ["tp", "dp"])
        with pytest.raises(ValueError, match="expected one distinct name for each"):
            HyperCommGrid([2, 2], ["tp", "tp"])
        theirs = pytest.importorskip("megatron.core.hyper_comm_grid", reason="needs megatron-core")
        pytest.importorskip("einops", reason="Megatron lists ranks by einops")
        for dims in ("cp", ["tp", "dp"], ["dp", "cp", "tp"]):
            other = theirs.HyperCommGrid([2, 2, 3], ["tp", "cp", "dp"], rank_offset=4)
            assert grid.get_rank_enum(dims) == other.get_rank_enum(dims)
