"""Ops that are torch's own operators on a CPU keep what they promise where torch's do otherwise."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.on_ranks import on_ranks
from tpkernels import ops
from tpkernels.extension import extension
from tpkernels.ops import inputs, vocab_cross_entropy, vocab_embedding

linear_module = import_module("tpkernels.ops.local.linear")


def test_linear_casts_weights_anew_in_each_call_of_an_autocast_region():
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = ops.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        second = ops.linear(x, weight)
    assert torch.equal(second, 2 * first)


class _Watched(Tensor):
    """A tensor that has its own say in what torch does with it."""


def test_linear_is_the_same_without_the_quick_look_at_operands(monkeypatch):
    """Operands that differ from usual ones in one respect or in several, and usual ones."""
    assert extension().module is not None, "the suite runs with the extension"
    x, weight, bias = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    xs = [x, x[0], x[0, 0], x.view(2, 2, 8), x[:0], x[:, :7], x.t(), torch.randn(8, 4).t()]
    xs += [x.as_subclass(_Watched), x.double(), x.int(), x.bfloat16(), x.cfloat(), x.to("meta")]
    xs += [x.to_sparse(), x.clone().requires_grad_()]
    weights = [weight, weight[:5], weight[:, :7], weight[0], weight[None], weight.to("meta"), weight.double()]
    weights += [torch.nn.Parameter(weight), weight.as_subclass(_Watched), weight.t()]
    biases = [None, bias, bias[:5], bias[:1], bias[None], bias[0], bias.double(), bias.to("meta")]
    biases += [torch.nn.Parameter(bias), bias.expand(4, 8), bias.as_subclass(_Watched)]
    looks = []
    for cast, operands in product((False, True), product(xs, weights, biases)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            looks.append(inputs.quick_linear()(*operands) is not None)
            assert not (cast and looks[-1])
            by_look = _outcome(operands)
            with monkeypatch.context() as patch:
                patch.setattr(linear_module, "quick_linear", lambda: lambda x, weight, bias: None)
                assert _outcome(operands) == by_look, [(each.shape, each.dtype) for each in operands[:2]]
    assert 20 < sum(looks) < 200
    assert inputs.quick_linear()(None, 1, "bias") is None
    with pytest.raises(TypeError, match="linear"):
        inputs.quick_linear()(x)
    seen = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        ops.linear(x, weight)
    assert F.linear in seen


def _outcome(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        y = ops.linear(*operands)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return type(error), str(error)
    numbers = None if y.is_meta else y.detach().as_subclass(Tensor).to_dense().view(torch.uint8).tolist()
    return type(y), y.shape, y.dtype, y.requires_grad, numbers


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_results_of_linear_may_be_changed_in_place(activation):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    y = ops.linear(x, weight, None, activation)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y += 1
    (changed,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("size", [430.0, 1e3, 1e5, 1e10])
def test_the_gradient_of_a_huge_gelu_is_one_or_zero(size):
    x = torch.tensor([[size], [-size]], requires_grad=True)
    one = torch.ones(1, 1)
    (grad,) = torch.autograd.grad(ops.mlp(x, one, None, one, None, activation="gelu_tanh").sum(), x)
    assert grad.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(("tokens", "features"), [(256, 64), (512, 64), (512, 1024)])
def test_gradients_of_a_norm_have_memory_of_their_own(tokens, features):
    """Summed in one call, in passes, and in blocks."""
    x, weight, bias = torch.randn(tokens, features), torch.ones(features), torch.zeros(features)
    weight.requires_grad_(), bias.requires_grad_()
    ops.layer_norm(x, weight, bias).sum().backward()
    assert weight.grad.untyped_storage().data_ptr() != bias.grad.untyped_storage().data_ptr()
    weight.grad += weight


@on_ranks(1)
def test_losses_may_be_changed_in_place():
    target = torch.tensor([[0, 3], [2, 1]])
    for shape in ((4,), (2, 2)):
        logits = torch.randn(*shape, 5, requires_grad=True)
        loss = vocab_cross_entropy(logits, target.view(shape), dist.group.WORLD)
        loss *= 2
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        exact = 2 * F.cross_entropy(logits.view(4, 5), target.view(4), reduction="sum")
        torch.testing.assert_close(grad, *torch.autograd.grad(exact, logits))


@on_ranks(1)
def test_an_embedding_refuses_what_it_refuses_on_more_ranks():
    table, ids = torch.randn(5, 3), torch.tensor([1, 2])
    for message, given, weight, split in (
        ("expected ids on cpu", torch.empty(3, dtype=torch.long, device="meta"), table, False),
        (r"expected ids \(tokens, \.\.\.\)", torch.tensor(1), table, True),
        ("expected floating-point weight_shard", ids, torch.tensor(1.0), False),
    ):
        with pytest.raises(ValueError, match=message):
            vocab_embedding(given, weight, dist.group.WORLD, sequence_parallel=split)


def test_maps_without_gradients_are_refused_as_with_them():
    x, weight = torch.randn(3, 4, 8), torch.randn(8, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda each: ops.mlp(each, weight, None, weight, None, activation="gelu"))(x)
