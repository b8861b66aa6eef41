"""Random streams, recomputation, utilities and mappings under Megatron's names."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.fake_world import fake_rank
from tpkernels.groups.random import get_rng_tracker, manual_seed
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.interop.megatron_core import mappings, rng, utilities
from tpkernels.interop.megatron_core import parallel_state as ps


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
    data = {"a": torch.full((2, 3), rank), "b": torch.tensor(rank), "c": torch.empty(0, 4, dtype=torch.int64)}
    own = utilities.broadcast_data(["a", "b", "c"], data if rank % 2 == 0 else {}, torch.int64)
    # by a group that is passed, of other ranks and sizes than the tensor group
    numbers = {"a": torch.arange(rank + 5)}
    groups = (ps.get_model_parallel_group(), ps.get_data_parallel_group())
    sent = [utilities.broadcast_data(["a"], numbers, torch.int64, tp_group=group) for group in groups]
    return [
        chunk.tolist(),
        chunk.data_ptr() == x[rank % 2 * 1 :].data_ptr() or rank % 2 == 1,
        copy.data_ptr() != chunk.data_ptr(),
        torch.equal(utilities.gather_split_1d_tensor(chunk), x.view(-1)),
        own["a"].tolist(),
        [own["b"].item(), list(own["c"].shape), own["a"].dtype == torch.int64],
        [each["a"].numel() for each in sent],
        utilities.param_is_not_tensor_parallel_duplicate(torch.zeros(1)),
        utilities.param_is_not_tensor_parallel_duplicate(torch.zeros(1), ps.get_data_parallel_group()),
    ]


def test_utilities_of_a_tensor_group(ranks4):
    for rank, found in enumerate(ranks4.run(utilities_of_ranks)):
        first, place = rank // 2 * 2, rank % 2
        assert found == [
            [float(i) for i in range(6 * place, 6 * place + 6)],
            True,
            True,
            True,
            [[first] * 3] * 2,
            [first, [0, 4], True],
            [first + 5, place + 5],
            place == 0,
            rank < 2,
        ]


def broadcasts_that_fail():
    """All ranks are told of the first rank's mistake; one with other keys is told alone, and none waits."""
    ps.initialize_model_parallel(2)
    data = {"a": torch.zeros(2, dtype=torch.float64)}
    keys = ["a"] if dist.get_rank() == 0 else ["b"]
    calls = ((["a"], torch.float32), (["b"], torch.float32), (keys, torch.float64))
    return [error_of(utilities.broadcast_data, each, data, dtype) for each, dtype in calls]


def test_broadcasts_that_fail_leave_no_rank_waiting(ranks2):
    first, second = ranks2.run(broadcasts_that_fail)
    assert first[0] == second[0]
    assert "expected data['a'] of torch.float32, got torch.float64" in first[0][1]
    assert "expected 'b' in data of the first rank" in second[1][1]
    assert first[2] == ("nothing", "")
    assert "expected the first rank's keys ['a'], got ['b']" in second[2][1]


UNEVEN, HALVES = [slice(0, 3), slice(3, 4)], [(slice(None), slice(0, 2)), (slice(None), slice(2, 4))]
REGIONS = {  # what gathers, what scatters sums, and each rank's of 4 by 4 numbers
    "uneven_rows": (
        partial(mappings.gather_from_sequence_parallel_region, output_split_sizes=[3, 1]),
        partial(mappings.reduce_scatter_to_sequence_parallel_region, input_split_sizes=[3, 1]),
        UNEVEN,
    ),
    "last_dimension": (
        mappings.all_gather_last_dim_from_tensor_parallel_region,
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
        HALVES,
    ),
}


def regions(name):
    """Forward and backward, the ranks' weights being 1 and 2; largest differences."""
    ps.initialize_model_parallel(2)
    rank, (gather, reduce_scatter, places) = dist.get_rank(), REGIONS[name]
    full = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    weights = torch.linspace(1, 2, 16, dtype=torch.float64).view(4, 4)
    x, z = full[places[rank]].clone().requires_grad_(), (full * (rank + 1)).requires_grad_()
    gathered, scattered = gather(x), reduce_scatter(z)
    (gathered * weights * (rank + 1)).sum().backward()
    (scattered * (rank + 1)).sum().backward()
    owner = torch.ones_like(full)
    owner[places[1]] = 2
    found = [
        gathered - full,
        x.grad - 3 * weights[places[rank]],
        scattered - 3 * full[places[rank]],
        z.grad - owner,
    ]
    return [float(each.detach().abs().max()) for each in found]


@pytest.mark.parametrize("name", REGIONS)
def test_regions_are_gathered_and_their_sums_scattered(name, ranks2):
    assert ranks2.run(regions, name) == [[0.0] * 4] * 2


def exchanged():
    """Rows by uneven sizes and back again; tokens for features and back again; gradients."""
    ps.initialize_model_parallel(2)
    group, rank = ps.get_tensor_model_parallel_group(), dist.get_rank() % 2
    sent = [[1, 2], [3, 0]]  # rows from rank i to rank j
    received = [sent[other][rank] for other in range(2)]
    x = (torch.arange(6.0).view(3, 2) + 10 * rank).requires_grad_()
    there = mappings.all_to_all(group, x, received, sent[rank])
    back = mappings.all_to_all(group, there, sent[rank], received)
    (back * torch.arange(3.0).view(3, 1)).sum().backward()
    assert torch.equal(back, x)
    assert x.grad.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    tokens = torch.arange(8.0).view(2, 4) + 100 * rank
    features = mappings.all_to_all_sp2hp(tokens)
    assert torch.equal(mappings.all_to_all_hp2sp(features), tokens)
    return [there.tolist(), features.tolist()]


def test_rows_are_exchanged(ranks2):
    assert ranks2.run(exchanged) == [
        [
            [[0.0, 1.0], [10.0, 11.0], [12.0, 13.0], [14.0, 15.0]],
            [[0.0, 1.0], [4.0, 5.0], [100.0, 101.0], [104.0, 105.0]],
        ],
        [[[2.0, 3.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0], [102.0, 103.0], [106.0, 107.0]]],
    ]


# Streams, without ranks.


def test_a_tracker_of_its_own_forks_nests_and_is_restored():
    tracker = rng.CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    before = torch.get_rng_state()
    tracker.add("a", 1)
    tracker.add("b", 2)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
        with tracker.fork("b"):
            other = torch.rand(3)
            with tracker.fork("a"):
                second = torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(6), torch.cat([first, second]))
    with tracker.fork("b"):
        assert torch.equal(torch.rand(3), other)
    for name, seed in (("c", 1), ("a", 3)):
        with pytest.raises(ValueError, match=r"taken by another|exists already"):
            tracker.add(name, seed)
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


def test_a_program_seeded_by_torch_draws_as_without_streams():
    torch.manual_seed(3)
    expected = torch.rand(4)
    with fake_rank(0, 1):
        ps.initialize_model_parallel(create_gloo_process_groups=False)
        torch.manual_seed(3)
        first = torch.rand(1)
        rng.model_parallel_cuda_manual_seed(9)
        with rng.get_cuda_rng_tracker().fork():
            torch.rand(5)
        assert torch.equal(torch.cat([first, torch.rand(3)]), expected)


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
    assert not rng.is_graph_safe_cuda_rng_tracker(rng.get_cuda_rng_tracker())


def test_a_checkpoints_states_go_to_megatron_and_back():
    with fake_rank(0, 1):
        ps.initialize_model_parallel(create_gloo_process_groups=False)
        manual_seed(13)
        saved = rng.states_to_megatron(get_rng_tracker().get_states())
        assert set(saved) == {"torch_rng_state", "rng_tracker_states"}
        expected = torch.rand(2)
        with get_rng_tracker().fork():
            named = torch.rand(2)
        get_rng_tracker().set_states(rng.states_from_megatron(saved))
        assert torch.equal(torch.rand(2), expected)
        with get_rng_tracker().fork():
            assert torch.equal(torch.rand(2), named)
    cuda = torch.zeros(16, dtype=torch.uint8)
    theirs = {
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": cuda,
        "rng_tracker_states": {"a": cuda},
    }
    ours = rng.states_from_megatron(theirs)
    assert {name: list(state) for name, state in ours.items()} == {"default": ["cpu", "cuda"], "a": ["cuda"]}
    assert rng.states_to_megatron(ours).keys() == theirs.keys()
    with pytest.raises(ValueError, match="without"):
        rng.states_from_megatron({"torch_rng_state": cuda})


def test_states_become_generators_and_back():
    state = torch.Generator().manual_seed(4).get_state()
    generator = rng.convert_cuda_rng_state(state, to_graphable=True)
    assert isinstance(generator, torch.Generator)
    assert rng.convert_cuda_rng_state(generator, to_graphable=True) is generator
    assert torch.equal(rng.convert_cuda_rng_state(generator), state)
    assert rng.convert_cuda_rng_state(state) is state
    with pytest.raises(ValueError, match="expected a tensor or a generator, got int"):
        rng.convert_cuda_rng_state(3)


# Utilities, without ranks.


def test_splits_that_do_not_divide_are_refused():
    x = torch.arange(12.0).view(3, 4)
    first, second = utilities.split_tensor_along_last_dim(x, 2)
    assert first.data_ptr() == x.data_ptr()
    assert torch.equal(second, x[:, 2:])
    assert utilities.split_tensor_along_last_dim(x, 2, True)[1].is_contiguous()
    assert utilities.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4) == (3, 6)
    assert utilities.divide(12, 4) == 3
    with fake_rank(1, 8):
        ps.initialize_model_parallel(8, create_gloo_process_groups=False)
        for refused in (
            lambda: utilities.split_tensor_along_last_dim(x, 3),
            lambda: utilities.split_tensor_into_1d_equal_chunks(x),
            lambda: utilities.VocabUtility.vocab_range_from_global_vocab_size(13, 1, 4),
        ):
            with pytest.raises(InvalidSizes, match="not divisible"):
                refused()
        for wrong in ([1] * 7, [2] * 8):
            with pytest.raises(ValueError, match=r"rows of each of 8 ranks|expected 2 rows"):
                mappings.gather_from_sequence_parallel_region(x, output_split_sizes=wrong)
        with pytest.raises(ValueError, match="expected 8 rows"):
            mappings.reduce_scatter_to_sequence_parallel_region(x, input_split_sizes=[1] * 8)
        with pytest.raises(ValueError, match="8 ranks divide"):
            mappings.all_to_all(ps.get_tensor_model_parallel_group(), x)


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
