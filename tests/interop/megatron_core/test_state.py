"""Random streams, recomputation and utilities under Megatron's names."""

import pytest
import torch
import torch.distributed as dist

from tests.fake_world import fake_rank
from tpkernels.groups.random import get_rng_tracker
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.interop.megatron_core import parallel_state as ps
from tpkernels.interop.megatron_core import rng, utilities


@pytest.fixture(autouse=True)
def _streams_as_before():
    tracker, moment = get_rng_tracker(), get_rng_tracker().snapshot()
    yield
    tracker.reset()
    tracker.return_to(moment)
    rng.initialize_rng_tracker(force_reset=True)


def streams():
    """A number of each stream, and whether the CPU's generator is where the caller left it."""
    ps.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    rng.model_parallel_cuda_manual_seed(7)
    drawn = []
    for name in ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"):
        with rng.get_cuda_rng_tracker().fork(name):
            drawn.append(float(torch.rand(1)))
    return drawn, torch.equal(before, torch.get_rng_state())


def test_streams_have_megatrons_seeds_and_the_callers_generator_stays(ranks4):
    """tensor rank = expert rank = rank % 2, and one rank to an expert"""
    seeds = [(7 + 2718 + rank % 2, 7 + 1024 + 100 * (rank % 2), 7) for rank in range(4)]
    drawn = [
        [float(torch.rand(1, generator=torch.Generator().manual_seed(s))) for s in each] for each in seeds
    ]
    assert ranks4.run(streams) == [(each, True) for each in drawn]


def recomputed():
    """Gradients with and without recomputation, and with shards saved; dropout draws alike."""
    ps.initialize_model_parallel(2)
    torch.manual_seed(3)
    rng.model_parallel_cuda_manual_seed(11)
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    asked = []

    def function(x, scale):
        asked.append(rng.is_checkpointing())
        with rng.get_cuda_rng_tracker().fork():
            dropped = torch.nn.functional.dropout(x @ weight, 0.5)
        return torch.nn.functional.dropout(dropped, 0.5) * (2.0 if scale is None else scale)

    moment = get_rng_tracker().snapshot()
    gradients = []
    for distribute in (None, False, True, "without"):
        get_rng_tracker().return_to(moment)
        weight.grad = None
        x = torch.linspace(0, 1, 32).view(4, 8).requires_grad_()
        y = function(x, None) if distribute == "without" else rng.checkpoint(function, distribute, x, None)
        after = torch.get_rng_state()
        y.square().sum().backward()
        gradients.append([y.detach(), x.grad, weight.grad, after])
        found = [x.grad is not None, torch.equal(after, torch.get_rng_state())]
    same = [all(torch.equal(a, b) for a, b in zip(each, gradients[-1], strict=True)) for each in gradients]
    return [*same, *found, asked == [True] * 6 + [False], not rng.is_checkpointing()]


def test_recomputation_draws_alike_and_gives_the_same_gradients(ranks2):
    assert ranks2.run(recomputed) == [[True] * 8] * 2


def utilities_of_ranks():
    ps.initialize_model_parallel(2)
    rank = dist.get_rank()
    x = torch.arange(12.0).view(3, 4)
    chunk = utilities.split_tensor_into_1d_equal_chunks(x)
    copy = utilities.split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    return [
        chunk.tolist(),
        chunk.data_ptr() == x[rank % 2 * 1 :].data_ptr() or rank % 2 == 1,
        copy.data_ptr() != chunk.data_ptr(),
        torch.equal(utilities.gather_split_1d_tensor(chunk), x.view(-1)),
        utilities.param_is_not_tensor_parallel_duplicate(torch.zeros(1)),
        utilities.param_is_not_tensor_parallel_duplicate(torch.zeros(1), ps.get_data_parallel_group()),
    ]


def test_utilities_of_a_tensor_group(ranks4):
    for rank, found in enumerate(ranks4.run(utilities_of_ranks)):
        place = rank % 2
        assert found == [
            [float(i) for i in range(6 * place, 6 * place + 6)],
            True,
            True,
            True,
            place == 0,
            rank < 2,
        ]


# Streams, without ranks.


def test_a_tracker_of_its_own_is_restored_and_forgets():
    tracker = rng.CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    before = torch.get_rng_state()
    tracker.add("a", 1)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(before, torch.get_rng_state())
    tracker.set_states({})
    assert tracker.states_ == {}
    assert not tracker.is_initialized()
    with pytest.raises(ValueError, match="expected states from get_states"):
        tracker.set_states({"a": 1234})
    assert "a" not in get_rng_tracker().get_states()


def test_the_face_and_the_process_share_streams():
    with fake_rank(1, 2):
        ps.initialize_model_parallel(2, create_gloo_process_groups=False)
        rng.model_parallel_cuda_manual_seed(5)
        ours = {k: v["cpu"] for k, v in get_rng_tracker().get_states().items() if k != "default"}
        assert ours.keys() == rng.get_all_rng_states().keys()
        assert all(torch.equal(ours[k], v) for k, v in rng.get_all_rng_states().items())
        rng.model_parallel_cuda_manual_seed(5, tp_rank=0, ep_rank=3, etp_rank=2)
        moved = rng.get_all_rng_states()
        for name, seed in (("model-parallel-rng", 5 + 2718), ("expert-parallel-rng", 5 + 1024 + 302)):
            assert torch.equal(moved[name], torch.Generator().manual_seed(seed).get_state())
        with pytest.raises(TypeError, match="a seed must be an integer"):
            rng.model_parallel_cuda_manual_seed(True)
        assert rng.get_all_rng_states().keys() == moved.keys()


@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_rank_in_the_place_of_the_reset_is_refused(rank):
    """Megatron 0.20 takes gtp_remat_rank there: a rank 1 would have reset the streams."""
    with fake_rank(0, 1):
        ps.initialize_model_parallel(create_gloo_process_groups=False)
        rng.model_parallel_cuda_manual_seed(5, False, False, False, 0, 0, 0, False)
        tracker = rng.get_cuda_rng_tracker()
        before = rng.get_all_rng_states()
        with pytest.raises(TypeError, match="newer Megatrons take gtp_remat_rank in its place"):
            rng.model_parallel_cuda_manual_seed(6, False, False, False, 0, 0, 0, rank)
        assert rng.get_cuda_rng_tracker() is tracker
        assert all(torch.equal(before[name], state) for name, state in rng.get_all_rng_states().items())
        rng.model_parallel_cuda_manual_seed(5, tp_rank=0, gtp_remat_rank=rank, force_reset_rng=True)
        assert rng.get_cuda_rng_tracker() is not tracker
        with pytest.raises(TypeError, match="positional"):
            rng.model_parallel_cuda_manual_seed(5, False, False, False, 0, 0, 0, False, 0)


def test_inference_draws_from_one_stream():
    rng.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    tracker = rng.get_cuda_rng_tracker()
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with tracker.fork("no such stream"):
        assert torch.equal(torch.rand(2), expected)


def test_what_streams_do_not_have_is_refused():
    with pytest.raises(NotImplementedError, match="use_cudagraphable_rng"):
        rng.CudaRNGStatesTracker(use_cudagraphable_rng=True)
    with pytest.raises(NotImplementedError, match="use_te_rng_tracker"):
        rng.get_cuda_rng_tracker(use_te_rng_tracker=True)


# Utilities, without ranks.


def test_elements_that_ranks_do_not_divide_are_refused():
    with fake_rank(1, 8):
        ps.initialize_model_parallel(8, create_gloo_process_groups=False)
        with pytest.raises(InvalidSizes, match="not divisible"):
            utilities.split_tensor_into_1d_equal_chunks(torch.arange(12.0))


class Ranked:
    def __init__(self, rank):
        self.rank = lambda: rank


def test_an_experts_replicas_are_counted_in_the_experts_group():
    counted = utilities.param_is_not_tensor_parallel_duplicate
    param = torch.zeros(1)
    assert not counted(param, Ranked(1), expert_tp_group=Ranked(0))
    param.allreduce = False
    assert counted(param, Ranked(1), expert_tp_group=Ranked(0))
    assert not counted(param, Ranked(1))
    param.tensor_model_parallel = True
    assert counted(param, Ranked(1), expert_tp_group=Ranked(1))
