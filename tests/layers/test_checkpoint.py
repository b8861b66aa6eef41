"""Recomputation gives the same gradients and leaves every random stream where it would have been."""

import pytest
import torch
import torch.nn.functional as F

from tests.layers.worlds import posing
from tpkernels import checkpoint, get_rng_tracker, manual_seed
from tpkernels.layers.dropout import ParallelDropout


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


@pytest.mark.parametrize("stream", ["default", "model-parallel-rng"])
def test_gradients_and_streams_are_those_without(streams, stream):
    *plain, plain_streams = run(noisy, streams, stream)
    *again, streams_again = run(lambda x, w: checkpoint(noisy, x, w), streams, stream)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert plain_streams.keys() == streams_again.keys()
    for name, state in plain_streams.items():
        assert torch.equal(state, streams_again[name]), name


def test_nested_and_with_keywords(streams):
    def outer(x, *, w):
        return checkpoint(noisy, x, w) + checkpoint(noisy, x, w=w)

    *plain, _ = run(lambda x, w: noisy(x, w) + noisy(x, w), streams, "default")
    *again, _ = run(lambda x, w: checkpoint(outer, x, w=w), streams, "default")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


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
