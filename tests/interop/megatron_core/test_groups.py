"""Groups, collections and grids of ranks that move data."""

import pytest

from tests.fake_world import fake_rank
from tests.interop.megatron_core import group_cases as cases
from tpkernels.interop.megatron_core.grid import HyperCommGrid
from tpkernels.interop.megatron_core.groups import ProcessGroupCollection, from_megatron
from tpkernels.layers.world import tensor_world
from tpkernels.runtime.initialize import initialize_model_parallel
from tpkernels.runtime.state import ParallelStateError, current
from tpkernels.topology.sizes import InvalidSizes


def test_every_group_adds_up_its_ranks(ranks4):
    for found in ranks4.run(cases.sums):
        assert [name for name, right in found.items() if not right] == []


def test_ranks_that_disagree_are_all_told(ranks4):
    told = ranks4.run(cases.disagreement)
    assert {kind for kind, _ in told} == {"ParallelStateError"}
    assert all("create_all_gather_group=True" in text for _, text in told)


def test_grids_beside_each_other_make_groups_without_each_other(ranks4):
    found = ranks4.run(cases.two_grids)
    assert [each[0] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each[1] for each in found] == [1.0, 1.0, 5.0, 5.0]
    assert [each[2:5] for each in found] == [[None, True, "KeyError"]] * 4
    assert [each[5] for each in found] == [None, None, [2, 3], [2, 3]]
    assert [each[6:] for each in found] == [["ValueError", "KeyError"]] * 4


def test_groups_are_made_by_their_members_alone(ranks4):
    assert ranks4.run(cases.uneven_history) == [
        [-1.0, 6.0, 3.0, 1.0, 2.0],
        [3.0, 6.0, 1.0, 1.0, 4.0],
        [3.0, 6.0, 1.0, 5.0, 2.0],
        [-1.0, 6.0, 3.0, 5.0, 4.0],
    ]


def test_lists_that_overlap_leave_the_world_or_differ_are_refused_on_all_ranks(ranks4):
    for overlapping, outside, differing in ranks4.run(cases.listed_wrongly):
        assert overlapping[0] == outside[0] == "InvalidSizes"
        assert "no rank in common" in overlapping[1]
        assert "ranks 0 to 3" in outside[1]
        assert differing[0] == "ParallelStateError"


def test_layers_take_groups_that_are_passed(ranks2):
    for state, *others in ranks2.run(cases.an_mlp_of_groups_that_are_passed):
        assert others == [state] * 4


def test_layers_take_what_stands_for_a_group_of_one(ranks2):
    for state, *others in ranks2.run(cases.an_mlp_of_one):
        assert others == [state] * 2


def test_groups_of_megatrons_are_adopted(ranks4):
    pytest.importorskip("megatron.core", reason="needs megatron-core, to make groups")
    assert ranks4.run(cases.adopted) == [{}] * 4


class Two:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def test_what_stands_for_a_group_of_more_holds_weights_and_says_so():
    world = tensor_world(Two(1))
    assert (world.rank, world.size, world.ranks) == (1, 2, ())
    with pytest.raises(ParallelStateError, match=r"was said by Two, which is no process group: a layer may"):
        _ = world.group
    with pytest.raises(ValueError, match=r"rank\(\) below size\(\) 2, got 2"):
        tensor_world(Two(2))


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
        with pytest.raises(TypeError, match="what has one of these as its `tp`"):
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
        with pytest.raises(ValueError, match="a name of its own"):
            HyperCommGrid([2, 2], ["tp", "tp"])
        theirs = pytest.importorskip("megatron.core.hyper_comm_grid", reason="needs megatron-core")
        pytest.importorskip("einops", reason="Megatron lists ranks by einops")
        for dims in ("cp", ["tp", "dp"], ["dp", "cp", "tp"]):
            other = theirs.HyperCommGrid([2, 2, 3], ["tp", "cp", "dp"], rank_offset=4)
            assert grid.get_rank_enum(dims) == other.get_rank_enum(dims)
