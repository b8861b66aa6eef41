"""`groups/random.py`: streams go on where they stopped, apart from each other, seeded as in Megatron."""

import pytest
import torch

from tests.fake_world import fake_rank
from tpkernels import parallel_state
from tpkernels.groups import random
from tpkernels.groups.initialize import initialize_model_parallel
from tpkernels.groups.plan import plan_groups
from tpkernels.groups.random import RngTracker, get_rng_tracker, manual_seed
from tpkernels.groups.state import ParallelState, ParallelStateError, use


def draws(seed, count):
    """What a fresh generator gives."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def draw(count=1):
    return torch.rand(count).tolist()


def draw_of(tracker, name="model-parallel-rng", count=1):
    with tracker.fork(name):
        return draw(count)


@pytest.fixture(autouse=True)
def _undisturbed():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    get_rng_tracker().reset()


@pytest.fixture
def tracker():
    torch.manual_seed(1)
    tracker = RngTracker()
    tracker.add("a", 11)
    tracker.add("b", 22)
    return tracker


def test_each_stream_goes_on_where_it_stopped_however_forks_nest(tracker):
    """A stream forked inside itself goes on, too: from the stored state it would draw the same mask twice."""
    drawn = {"default": [], "a": [], "b": []}

    def drawing(name, *outer):
        for inner in drawn:
            drawn[name] += draw()
            if len(outer) < 3:
                with tracker.fork(inner):
                    drawing(inner, name, *outer)
        drawn[name] += draw()

    drawing("default")
    seeds = {"default": 1, "a": 11, "b": 22}
    assert drawn == {name: draws(seed, len(drawn[name])) for name, seed in seeds.items()}
    assert min(map(len, drawn.values())) > 20


def draw_and_fail(tracker):
    with tracker.fork("a"), tracker.fork("b"):
        draw()
        raise KeyError


def test_fork_comes_back_after_an_exception(tracker):
    with pytest.raises(KeyError):
        draw_and_fail(tracker)
    assert draw() == draws(1, 1)
    assert draw_of(tracker, "b") == draws(22, 2)[1:]


@pytest.mark.parametrize(
    ("name", "seed", "error", "words"),
    [
        ("a", 44, ValueError, "random stream 'a' exists already"),
        ("default", 44, ValueError, "random stream 'default' exists already"),
        ("c", 22, ValueError, "seed 22 is taken"),
        *(("c", seed, TypeError, "a seed must be an integer") for seed in (1.9, "7", None, True)),
        *(("c", seed, ValueError, r"from 0 to 2\*\*63 - 1") for seed in (-1, 2**63)),
    ],
)
def test_names_used_twice_and_seeds_that_are_none_are_refused(tracker, name, seed, error, words):
    first = draw()
    with pytest.raises(error, match=words):
        tracker.add(name, seed)
    with pytest.raises(ValueError, match="no random stream 'c'; known are default, a, b"), tracker.fork("c"):
        pass
    tracker.add("c", 33)
    assert first + draw() == draws(1, 2)  # the live stream is undisturbed


def test_states_survive_a_checkpoint(tracker, tmp_path):
    draw_of(tracker, "a", 3)
    draw(2)
    torch.save(tracker.get_states(), tmp_path / "states")
    draw(7)
    draw_of(tracker, "b", 7)
    other = RngTracker()
    other.set_states(torch.load(tmp_path / "states", weights_only=True))  # no code is unpickled
    assert draw() == draws(1, 3)[2:]
    assert draw_of(other, "a") == draws(11, 4)[3:]
    assert draw_of(other, "b") == draws(22, 1)


def test_states_taken_inside_a_fork_are_live(tracker):
    with tracker.fork("a"):
        draw()
        states = tracker.get_states()
        draw(5)
        tracker.set_states(states)
        assert draw() == draws(11, 2)[1:]
    assert draw() == draws(1, 1)


def test_states_that_are_refused_leave_the_streams_as_they_are(tracker):
    states = tracker.get_states()
    zeros = torch.zeros(3, dtype=torch.uint8)
    for wrong in (None, {}, {"a": {}}, {"default": {"cuda": 1}}):
        with pytest.raises(ValueError, match=r"get_states\(\)|no state of the CPU's generator"):
            tracker.set_states(wrong)
    for states_of_none in (states | {"a": {"cpu": zeros}}, {"a": torch.zeros(5056, dtype=torch.uint8)}):
        with pytest.raises(ValueError, match="'a' is not one of a generator"):
            tracker.set_states(states_of_none)
    with pytest.raises(ValueError, match="of a generator of cuda, but these streams have"):
        tracker.set_states(megatrons(a=41))
    with tracker.fork("a"):
        for fewer in ({"a": states["a"]}, {"a": torch.get_rng_state()}):
            with pytest.raises(ValueError, match=r"those of \['a', 'default'\]; outside of a fork also"):
                tracker.set_states(fewer)
    assert draw_of(tracker, "a") == draws(11, 1)
    assert draw_of(tracker, "b") == draws(22, 1)


def test_reset_forgets_streams_and_seeds_outside_of_forks(tracker):
    words = r"cannot reset random streams inside fork\('a'\)"
    with tracker.fork("a"), pytest.raises(RuntimeError, match=words):
        tracker.reset()
    tracker.reset()
    tracker.add("a", 22)
    assert draw_of(tracker, "a") == draws(22, 1)


@pytest.mark.parametrize("rank", range(16))
def test_seeds_are_megatrons_on_every_rank(rank):
    plan = plan_groups(world_size=16, tensor=4, expert=2, pipeline=2)
    tensor_rank, expert_rank = plan.index_in(rank, "tp"), plan.index_in(rank, "ep")
    with use(ParallelState(rank=rank, plan=plan, process_groups={})):
        manual_seed(1234)
        for name, seed in {
            "default": 1234,
            "data-parallel-rng": 1234,
            "model-parallel-rng": 1234 + 2718 + tensor_rank,
            "expert-parallel-rng": 1234 + 1024 + 100 * expert_rank + tensor_rank,
        }.items():
            assert draw_of(get_rng_tracker(), name) == draws(seed, 1)


def test_a_tensor_rank_that_was_set_is_seeded_for_and_a_state_is_needed():
    with pytest.raises(ParallelStateError, match="initialize_model_parallel"):
        manual_seed(1)
    with fake_rank(0, 4):
        initialize_model_parallel(4)
        parallel_state.set_tensor_model_parallel_rank(3)
        manual_seed(5)
        with pytest.raises(ValueError, match=r"a seed must be from 0 to 2\*\*63 - 1"):
            manual_seed(2**63 - 1)  # the model-parallel stream's would be larger
        assert draw_of(get_rng_tracker()) == draws(5 + 2718 + 3, 1)


class FakeCuda:
    """Stands for a CUDA device's generator: states as small, numbers that say where they come from."""

    def __init__(self, _device="cuda"):
        self.seed = self.drawn = 0

    def manual_seed(self, seed):
        self.seed, self.drawn = seed, 0
        return self

    def get_state(self):
        return torch.tensor([self.seed, self.drawn]).view(torch.uint8)

    def set_state(self, state):
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.seed, self.drawn = state.view(torch.int64).tolist()

    def draw(self):
        self.drawn += 1
        return self.seed, self.drawn


@pytest.fixture
def cuda(monkeypatch):
    """A machine with one."""
    live = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", live.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", live.set_state)
    monkeypatch.setattr(torch.cuda, "manual_seed", live.manual_seed)
    cpu = random._generator
    monkeypatch.setattr(random, "_generator", lambda name: FakeCuda() if name == "cuda" else cpu(name))
    return live


def test_streams_of_cuda_alone_leave_the_cpus_generator_to_the_caller(cuda):
    with fake_rank(1, 2):
        initialize_model_parallel(2)
        torch.manual_seed(77)
        manual_seed(5, cuda_only=True)
        streams = get_rng_tracker()
        drawn = draw()
        with streams.fork():
            assert cuda.draw() == (5 + 2718 + 1, 1)
            drawn += draw()
        moment = streams.snapshot()
        drawn += draw()
        assert cuda.draw() == (5, 1)
        with streams.replay(moment):
            assert (draw(), cuda.draw()) == (drawn[2:], (5, 1))  # from the CPU again, too
        with streams.fork():
            assert cuda.draw() == (5 + 2718 + 1, 2)
        assert drawn + draw() == draws(77, 4)
        assert streams.get_states()["model-parallel-rng"].keys() == {"cuda"}
        streams.reset(cuda_only=False)


def test_streams_of_cuda_alone_need_cuda(tracker):
    for call in (tracker.reset, RngTracker):
        with pytest.raises(RuntimeError, match="cuda_only=True: expected a CUDA device"):
            call(cuda_only=True)
    assert draw_of(tracker, "a") == draws(11, 1)


def megatrons(**seeds):
    """States as Megatron's tracker keeps them, each after two draws."""
    return {name: torch.tensor([seed, 2]).view(torch.uint8) for name, seed in seeds.items()}


@pytest.mark.parametrize("cuda_only", [True, False])
def test_states_of_megatrons_tracker_load(cuda, tracker, cuda_only):
    if cuda_only:
        tracker = RngTracker(cuda_only=True)
    else:
        with pytest.raises(ValueError, match=r"'c' holds no state of the CPU's generator.*cuda_only=True"):
            tracker.set_states(megatrons(c=41))  # a stream that is new
    cuda.manual_seed(9)
    tracker.set_states(megatrons(a=41, b=42))
    assert cuda.draw() == (9, 1)
    with tracker.fork("a"):
        assert cuda.draw() == (41, 3)
        if not cuda_only:
            assert draw() == draws(11, 1)  # of which Megatron knows nothing
    with tracker.fork("b"):
        assert cuda.draw() == (42, 3)


def test_generators_and_states_of_the_cpu_load_in_megatrons_form(tracker):
    states = {"a": torch.Generator().manual_seed(41), "b": torch.Generator().manual_seed(42).get_state()}
    tracker.set_states(states)
    for name, seed in (("a", 41), ("b", 42), ("default", 1)):
        assert draw_of(tracker, name) == draws(seed, 1)


@pytest.mark.gpu
def test_streams_cover_the_gpu():
    torch.manual_seed(1)
    tracker = RngTracker()
    tracker.add("a", 11)
    seeds = {seed: torch.Generator("cuda").manual_seed(seed) for seed in (1, 11)}
    expected = {seed: torch.rand(4, device="cuda", generator=each) for seed, each in seeds.items()}
    found = {1: [torch.rand(2, device="cuda")], 11: []}
    for _ in range(2):
        with tracker.fork("a"):
            found[11].append(torch.rand(2, device="cuda"))
    found[1].append(torch.rand(2, device="cuda"))
    for seed, drawn in found.items():
        torch.testing.assert_close(torch.cat(drawn), expected[seed], rtol=0, atol=0)
