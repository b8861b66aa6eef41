"""`layers/world.py`: a layer finds its group once, and says when that cannot be used."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_world import fake_rank
from tests.layers.worlds import posing
from tpkernels import ColumnParallelLinear, parallel_state
from tpkernels.groups.initialize import create_parallel_state, initialize_model_parallel
from tpkernels.groups.plan import plan_groups
from tpkernels.groups.state import ParallelStateError, uninstall
from tpkernels.layers.world import tensor_world


@pytest.fixture(autouse=True)
def _nothing_stays_set():
    yield
    uninstall()


def test_the_current_state_is_the_default():
    with posing(3, 4) as state:
        world = tensor_world()
        assert (world.rank, world.size, world.group) == (3, 4, state.process_group("tp"))
        assert repr(world) == "rank 3 of 4"


def test_no_state_is_a_clear_error():
    for build in (tensor_world, lambda: ColumnParallelLinear(4, 6)):
        with pytest.raises(ParallelStateError, match=r"is not initialized: call tpkernels.initialize"):
            build()
    parallel_state.set_tensor_model_parallel_rank(1)  # without a size
    with pytest.raises(ParallelStateError, match="not initialized"):
        tensor_world()


def test_anything_that_has_a_group_will_do():
    with fake_rank(5, 8):
        state = create_parallel_state(plan_groups(world_size=8, tensor=4))
        assert tensor_world(state).group is state.process_group("tp")
        assert (tensor_world(state).rank, tensor_world(state).size) == (1, 4)
        group = dist.new_group([1, 5])
        for accepted in (group, SimpleNamespace(tp=group), SimpleNamespace(tp=Standing(1, 2))):
            assert (tensor_world(accepted).rank, tensor_world(accepted).size) == (1, 2)
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        for accepted in (mesh, mesh["tp"]):
            assert (tensor_world(accepted).rank, tensor_world(accepted).size) == (1, 2)
        assert (tensor_world(mesh["dp"]).rank, tensor_world(mesh["dp"]).size) == (2, 4)
        flat = init_device_mesh("cpu", (8,))
        assert (tensor_world(flat).rank, tensor_world(flat).size) == (5, 8)


def test_what_has_no_group_is_refused():
    with fake_rank(0, 4):
        with pytest.raises(TypeError, match=r"expected a ParallelState, .* got 'tp'"):
            tensor_world("tp")  # type: ignore[arg-type]
        for wrong in (SimpleNamespace(tp=None), SimpleNamespace(tp=2)):
            with pytest.raises(TypeError, match="an object with such a group `tp`"):
                tensor_world(wrong)
        with pytest.raises(TypeError, match="got the group of other ranks"):
            tensor_world(dist.new_group([1, 2]))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "model"))
        with pytest.raises(ValueError, match=r"one called 'tp', .* as in mesh\['model'\]"):
            tensor_world(mesh)
        gone = dist.new_group([0, 1])
        dist.destroy_process_group(gone)
        with pytest.raises(ParallelStateError, match="destroyed"):
            tensor_world(gone)


def test_sizes_set_on_the_fly_build_shards_without_ranks():
    parallel_state.set_tensor_model_parallel_world_size(16)
    assert repr(tensor_world()) == "rank 0 of 16"
    parallel_state.set_tensor_model_parallel_rank(7)
    world, layer = tensor_world(), ColumnParallelLinear(1024, 512)
    assert repr(world) == "rank 7 of 16"
    assert layer.weight.shape == (32, 1024)
    with pytest.raises(ParallelStateError, match="set on the fly"):
        layer(torch.randn(2, 1024))
    with pytest.raises(ParallelStateError, match=r"rank 7 of 16 was set on the fly: .* no process group"):
        _ = world.group
    parallel_state.set_tensor_model_parallel_rank(16)
    with pytest.raises(ParallelStateError, match=r"tensor rank 16 of 16, .* does not exist"):
        tensor_world()


def test_sizes_set_on_the_fly_as_they_are_keep_the_group():
    with posing(1, 2) as state:
        parallel_state.set_tensor_model_parallel_world_size(2)
        assert tensor_world().group is state.process_group("tp")
        parallel_state.set_tensor_model_parallel_rank(0)
        with pytest.raises(ParallelStateError, match="on the fly"):
            _ = tensor_world().group


def test_a_destroyed_group_is_an_error():
    with fake_rank(1, 4):
        initialize_model_parallel(2)
        world = tensor_world()
        assert world.group.size() == 2
        parallel_state.destroy_model_parallel()
        with pytest.raises(ParallelStateError, match="was destroyed; build layers again"):
            _ = world.group
    with fake_rank(1, 2):
        world = tensor_world(dist.group.WORLD)
        held = world.group
        dist.destroy_process_group()
        with pytest.raises(ParallelStateError, match="was destroyed"):
            _ = world.group
        assert held is not None


def test_a_forked_child_is_refused(monkeypatch):
    with posing(0, 2):
        world = tensor_world()
        monkeypatch.setattr("os.getpid", lambda: 1)
        with pytest.raises(ParallelStateError, match="a forked child cannot use it"):
            _ = world.group


def test_copies_share_the_group_and_pickles_find_it_again():
    with posing(1, 2):
        world = tensor_world()
        assert copy.deepcopy(world) is world
        assert copy.copy(world) is world
        saved = pickle.dumps(world)
        assert pickle.loads(saved).group is world.group
    with posing(0, 2), pytest.raises(ParallelStateError, match=r"as tensor rank 1 of 2, .* rank 0 of 2"):
        pickle.loads(saved)


def test_a_compiled_function_may_ask_for_the_group():
    with posing(0, 2):
        world = tensor_world()
        size = torch.compile(lambda x: x * world.group.size(), fullgraph=True, backend="eager")
        assert size(torch.ones(1)) == 2


class Standing:
    """What stands for a group, with a rank and a size and nothing else."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: size


def test_what_stands_for_a_group_of_one_gets_one():
    with fake_rank(2, 4):
        world = tensor_world(Standing(0, 1))
        assert dist.get_process_group_ranks(world.group) == [2]
        assert tensor_world(Standing(0, 1)).group is world.group
    with fake_rank(0, 1):
        assert tensor_world(Standing(0, 1)).group is dist.group.WORLD
    world = tensor_world(Standing(0, 1))
    with pytest.raises(ParallelStateError, match="init_process_group before the first forward, also for"):
        _ = world.group
    with fake_rank(0, 1):  # initialized since the layer was built
        assert world.group is dist.group.WORLD


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0.5, 2)])
def test_what_stands_for_a_group_must_make_sense(rank, size):
    with pytest.raises((ValueError, TypeError), match=r"rank\(\)|size\(\)"):
        tensor_world(Standing(rank, size))
