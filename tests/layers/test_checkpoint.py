"""Recomputation gives the same gradients and leaves every random stream where it would have been."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as checkpoint_in_torch

from tests.checks import error_of
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tpkernels import checkpoint, get_rng_tracker, initialize_model_parallel, manual_seed
from tpkernels.layers.attention import ParallelDropout


@pytest.fixture
def streams():
    with posing(1, 2):
        manual_seed(7)
        yield get_rng_tracker()


def noisy(x, w):
    """Draws from three streams."""
    x = F.dropout(x @ w, 0.5)
    with get_rng_tracker().fork():
        x = F.dropout(x @ w, 0.3)
        with get_rng_tracker().fork("data-parallel-rng"):
            x = x + torch.randn_like(x)
    return F.dropout(x.tanh() @ w, 0.5)


def run(function, tracker, stream):
    manual_seed(7)
    x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    w = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).requires_grad_()
    with tracker.fork(stream):
        y = function(x, w)
    with tracker.fork():
        torch.rand(3)  # streams go on between forward and backward
    y.sum().backward()
    return y.detach(), x.grad, w.grad, {name: state["cpu"] for name, state in tracker.get_states().items()}


def twice(x, w):
    return noisy(x, w) + noisy(x, w)


def nested(x, *, w):
    return checkpoint(noisy, x, w) + checkpoint(noisy, x, w=w)


@pytest.mark.parametrize(
    ("stream", "plain", "checkpointed"),
    [
        ("default", noisy, lambda x, w: checkpoint(noisy, x, w)),
        ("model-parallel-rng", noisy, lambda x, w: checkpoint(noisy, x, w)),
        ("default", twice, lambda x, w: checkpoint(nested, x, w=w)),
        ("default", noisy, lambda x, w: checkpoint(noisy, False, x, w)),  # a bool is Megatron's
    ],
    ids=["default", "model_parallel", "nested_with_keywords", "with_a_bool"],
)
def test_gradients_and_streams_are_those_without(streams, stream, plain, checkpointed):
    *expected, expected_streams = run(plain, streams, stream)
    *found, streams_found = run(checkpointed, streams, stream)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(streams_found, expected_streams, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_other_checkpoints_are_refused_where_they_would_draw_other_numbers(streams, reentrant):
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(noisy, torch.ones(4, 8, requires_grad=True), torch.eye(8)).sum()
    y = y + checkpoint_in_torch(ParallelDropout(0.5, is_split=True), x, use_reentrant=reentrant).sum()
    with pytest.raises(RuntimeError, match=r"'model-parallel-rng': expected tpkernels\.checkpoint around"):
        y.backward()
    alike = checkpoint_in_torch(ParallelDropout(0.5, is_split=False), x, use_reentrant=reentrant)
    alike.sum().backward()
    assert torch.equal(x.grad, alike.detach())


def test_who_sets_all_streams_in_backward_may_draw_from_them(streams):
    """As Megatron's own checkpoint does."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.states = streams.get_states()
            return ParallelDropout(0.5, is_split=True)(x)

        @staticmethod
        def backward(ctx, dy):
            present = streams.get_states()
            streams.set_states(ctx.states)
            slope = ParallelDropout(0.5, is_split=True)(torch.ones_like(dy))
            streams.set_states(present)
            return dy * slope

    x = torch.ones(64, requires_grad=True)
    y = Again.apply(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def attended(x, w):
    return F.scaled_dot_product_attention(x[None, None], (x @ w)[None, None], x[None, None])


def dropped(x, w):
    return F.dropout(x @ w, 0.1)


def drawn_from_a_stream(x, w):
    with get_rng_tracker().fork():
        return x @ w


def test_in_a_capture_no_state_is_set_and_what_draws_is_refused(streams, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for setter in ("set_rng_state", "get_rng_state"):
        monkeypatch.setattr(torch, setter, lambda *_: pytest.fail("a call that no capture allows"))
    x, w = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(attended(x, w).sum(), w)
    (found,) = torch.autograd.grad(checkpoint(attended, x, w).sum(), w)
    assert torch.equal(found, expected)
    captured = "random numbers, and a CUDA graph is being captured"
    with pytest.raises(RuntimeError, match=f"checkpoint: aten.bernoulli_.float draws {captured}"):
        checkpoint(dropped, x, w)
    with pytest.raises(RuntimeError, match="stream 'model-parallel-rng': a CUDA graph is being captured"):
        checkpoint(drawn_from_a_stream, x, w)


def test_only_arguments_are_kept(streams):
    def deep(x):
        for _ in range(10):
            x = x.exp().tanh()
        return x

    def kept(function):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            function(torch.ones(16, 16, requires_grad=True))
        return sum(sizes)

    assert kept(deep) == 20 * 256
    assert kept(lambda x: checkpoint(deep, x)) == 256


def test_without_gradients_nothing_is_recomputed(streams):
    calls = []
    with torch.no_grad():
        checkpoint(lambda x: calls.append(x), torch.ones(2, requires_grad=True))
    assert len(calls) == 1


def test_streams_return_when_recomputation_fails(streams):
    """The recomputation raises: the streams are those of the present all the same."""
    first = []

    def fails_later(x):
        if first:
            raise ValueError("not again")
        first.append(1)
        return noisy(x, torch.eye(8)).exp()

    y = checkpoint(fails_later, torch.ones(4, 8, requires_grad=True))
    before = {name: state["cpu"] for name, state in streams.get_states().items()}
    with pytest.raises(ValueError, match="not again"):
        y.sum().backward()
    assert all(torch.equal(before[name], state["cpu"]) for name, state in streams.get_states().items())


def test_compiles():
    def block(x, w):
        return checkpoint(lambda x: (x @ w).tanh(), x) @ w

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x, w), block(x, w))


def test_dropout_draws_apart_where_ranks_hold_parts():
    def drawn(rank, is_split):
        with posing(rank, 2):
            manual_seed(3)
            return ParallelDropout(0.5, is_split=is_split)(torch.ones(64))

    assert torch.equal(drawn(0, False), drawn(1, False))
    assert not torch.equal(drawn(0, True), drawn(1, True))


def test_dropout_keeps_to_training_and_to_probabilities():
    x = torch.ones(64)
    assert ParallelDropout(0.5, is_split=False).eval()(x) is x
    assert ParallelDropout(0.0, is_split=True)(x) is x
    assert ParallelDropout(1.0, is_split=False)(x).eq(0).all()
    with pytest.raises(ValueError, match=r"p: expected a probability from 0 to 1, got 1\.5"):
        ParallelDropout(1.5, is_split=False)


def test_a_bool_never_goes_to_the_function():
    assert checkpoint(lambda: "nothing to take", False) == "nothing to take"
    doubled = checkpoint(lambda x, *, twice: x * (1 + twice), False, torch.ones(2), twice=True)
    assert doubled.tolist() == [2, 2]


def test_a_bool_is_refused_under_compile():
    torch._dynamo.reset()
    block = torch.compile(lambda x: checkpoint(torch.sin, False, x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="expected no bool after the function under"):
        block(torch.ones(2, requires_grad=True))


def annotated(twice: bool, x=None):
    return x


class Annotated(torch.nn.Module):
    def forward(self, twice: "bool | None", x=None):
        return x


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Annotated(), (True, torch.ones(2))),
        (annotated, (True, torch.ones(2))),
        (lambda twice=False, x=None: x, (False, torch.ones(2))),
        (lambda twice, x: x, (True, torch.ones(2))),
        (lambda twice: twice, (True,)),
    ],
    ids=["module", "annotated", "by_default", "does_not_fit", "alone"],
)
def test_a_bool_that_may_be_the_functions_own_is_refused(function, args):
    with pytest.raises(TypeError, match=r"a bool after the function is .*keyword"):
        checkpoint(function, *args)


def outcome(way, alike=True):
    """Output and gradients of a checkpointed function; whether its input outlives forward; what is raised."""
    torch.manual_seed(1 if alike else torch.distributed.get_rank())
    source, w = torch.randn(4, 3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    x = source.sin()  # which saves its input, not its output
    alive = weakref.ref(x)
    y = checkpoint(lambda x, w: F.dropout((x @ w).tanh(), 0.3) @ w, way, x, w)
    del x
    lives = alive() is not None
    error = error_of(lambda: y.backward(torch.ones_like(y)))
    return [y.detach(), source.grad, w.grad], lives, error


@pytest.mark.parametrize("world", ["ranks1", "ranks2", "ranks4"])
@on_ranks()
def test_distributed_saved_activations_are_gathered_again():
    """Gradients are those of Megatron's False, of which the input outlives forward."""
    ranks = torch.distributed.get_world_size()
    initialize_model_parallel(ranks)
    (plain, lives, _), (again, lives_again, error) = outcome(False), outcome(True)
    assert error == ("nothing", "")
    assert all(map(torch.equal, plain, again))
    assert (lives, lives_again) == (True, ranks == 1)


@on_ranks(2)
def test_activations_that_cannot_be_distributed_are_refused_on_all_ranks():
    initialize_model_parallel(2)
    order = [0, 1, 2] if torch.distributed.get_rank() == 0 else [2, 1, 0]
    samples = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))[:, order].requires_grad_()
    y = checkpoint(lambda x: x.exp().tanh(), True, samples * 1)
    with pytest.raises(ValueError, match=r"the 2 tensor-parallel ranks divide, got \(3,\)"):
        checkpoint(torch.sin, True, torch.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match="a tensor as the first argument of the function"):
        checkpoint(lambda x: x[0], True, [samples])
    kind, text = outcome(True, alike=False)[2]
    assert kind == "RuntimeError"
    assert "the same on all tensor-parallel ranks, but it differed" in text
    with pytest.raises(RuntimeError, match="but it differed"):
        y.sum().backward()
