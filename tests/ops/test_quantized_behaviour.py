"""Ops in fp8 as citizens of PyTorch: autocast, views, frozen inputs, compile, what is saved and refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian
from torch.utils.checkpoint import checkpoint

from tests.ops.cases import gradients
from tests.ops.test_behaviour import saved_bytes
from tests.segments import tp_invariance
from tpkernels import Recipe, ops
from tpkernels.dispatch import primitives

T, K, N, BETWEEN = 12, 64, 48, 80
Op = Callable[..., Tensor]


def cases(quantize: Recipe | None) -> dict[str, tuple[Op, list[tuple[int, ...]]]]:
    """Ops of x and parameters, and shapes of these."""
    q = quantize
    return {
        "linear": (lambda x, w, b: ops.linear(x, w, b, quantize=q), [(N, K), (N,)]),
        "linear_gelu": (lambda x, w, b: ops.linear(x, w, b, "gelu", quantize=q), [(N, K), (N,)]),
        "swiglu": (lambda x, g, u: ops.swiglu(x, g, u, quantize=q), [(N, K), (N, K)]),
        "mlp": (
            lambda x, u, b, d, c: ops.mlp(x, u, b, d, c, quantize=q),
            [(BETWEEN, K), (BETWEEN,), (N, BETWEEN), (N,)],
        ),
        "gated_mlp": (
            lambda x, g, u, d: ops.mlp(x, u, None, d, None, w_gate=g, quantize=q),
            [(BETWEEN, K), (BETWEEN, K), (N, BETWEEN)],
        ),
    }


NAMES = list(cases(None))
RECIPES = [Recipe.rowwise(), Recipe.rowwise(wgrad="fp8"), Recipe.blockwise()]


def case(name: str, recipe: Recipe | None = RECIPES[0]) -> Op:
    return cases(recipe)[name][0]


def operands(name: str, leading: tuple[int, ...] = (T,), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = cases(None)[name][1]
    return [torch.randn(*shape).to(dtype) for shape in ((*leading, K), *shapes)]


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [x.equal(y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_what_casts_by_hand_give(name, recipe):
    """Products are not narrowed by it: results and gradients have the bits of bfloat16 inputs."""
    given, op = operands(name), case(name, recipe)
    expected = gradients(op, [t.bfloat16() for t in given], torch.ones(T, N))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(op, given, torch.ones(T, N))
        within = gradients(op, [t.bfloat16() for t in given], torch.ones(T, N))
    assert same(within, expected) == [True] * len(expected)
    assert same([t.bfloat16() for t in found], expected) == [True] * len(expected)
    assert [t.dtype for t in found] == [torch.bfloat16, *[torch.float32] * len(given)]


@pytest.mark.parametrize("name", NAMES)
def test_views_and_leading_dimensions(name):
    op = case(name)
    x, *parameters = operands(name, (4, 6))
    for view in (x.transpose(0, 1), x[:, ::2], x[:1].expand(5, 6, K), x[0, 0], x[:0], x.permute(1, 0, 2)[2]):
        strided = [p.t().contiguous().t() if p.ndim == 2 else p.repeat(2)[:: 1 + 1] for p in parameters]
        strided = [p if p.shape == q.shape else q for p, q in zip(strided, parameters, strict=True)]
        dy = torch.ones(()).expand(*view.shape[:-1], N)
        found = gradients(op, [view, *strided], dy)
        expected = gradients(op, [view.contiguous(), *(p.contiguous() for p in strided)], dy.contiguous())
        assert found[0].shape == (*view.shape[:-1], N)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_combination_of_required_gradients(name, recipe):
    given, op = operands(name), case(name, recipe)
    expected = gradients(op, given, torch.ones(T, N))[1:]
    for wanted in product([False, True], repeat=len(given)):
        if any(wanted):
            leaves = [t.clone().requires_grad_(want) for t, want in zip(given, wanted, strict=True)]
            op(*leaves).backward(torch.ones(T, N))
            for leaf, want, gradient in zip(leaves, wanted, expected, strict=True):
                assert leaf.grad.equal(gradient) if want else leaf.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_saved_than_without_quantize(name, dtype):
    """Whatever is frozen; x and parameters are not counted, but for x that is computed."""
    given = operands(name, dtype=dtype)
    for frozen in (False, True):
        bytes_ = []
        for recipe in (Recipe.rowwise(), None):
            x, *parameters = (t.clone() for t in given)
            x.requires_grad_()
            for parameter in parameters:
                parameter.requires_grad_(not frozen)
            op = case(name, recipe)
            bytes_.append(saved_bytes(lambda x, *p, op=op: op(x * 1, *p), x, *parameters))
        assert bytes_[0] <= bytes_[1]
    assert bytes_[0] == bytes_[1] or name != "linear"


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_ops_compute_and_save_what_eager_ones_do(name, recipe):
    op = case(name, recipe)
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 12):
        given = operands(name, (2, tokens))
        dy = torch.randn(2, tokens, N)
        assert all(same(gradients(compiled, given, dy), gradients(op, given, dy)))
    given = [t.requires_grad_() for t in operands(name)]
    assert saved_bytes(compiled, *given) == saved_bytes(op, *given)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_around_it(name, reentrant):
    given, found = operands(name), []
    for function in (case(name), lambda *t: checkpoint(case(name), *t, use_reentrant=reentrant)):
        leaves = [t.clone().requires_grad_() for t in given]
        y = function(*leaves)
        y.sum().backward()
        found.append([y.detach(), *(t.grad for t in leaves)])
    assert all(same(*found))


@pytest.mark.parametrize("name", NAMES)
def test_other_derivatives_are_refused(name):
    op, given = case(name), operands(name)
    words = "expected to be differentiated once, got a second derivative"
    with pytest.raises(RuntimeError, match=words):
        hessian(lambda *t: op(*t).square().sum(), tuple(given))
    leaves = [t.requires_grad_() for t in given]
    first = torch.autograd.grad(op(*leaves).square().sum(), leaves, create_graph=True)
    for leaf in leaves:
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(
                sum(g.square().sum() for g in first), leaf, retain_graph=True, allow_unused=True
            )
    x, *parameters = (t.detach() for t in given)
    compiled = torch.compile(op, backend="aot_eager")
    for function in (op, compiled):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(forward_ad.make_dual(x, x), *parameters)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: op(x, *parameters).sum())(x)


def test_first_gradients_with_a_graph_are_those_without():
    for name in NAMES:
        leaves = [t.requires_grad_() for t in operands(name)]
        loss = case(name)(*leaves).square().sum()
        with_graph = torch.autograd.grad(loss, leaves, create_graph=True, retain_graph=True)
        assert all(same(list(with_graph), list(torch.autograd.grad(loss, leaves))))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_changed_before_backward_is_torchs_error(name):
    leaves = [t.requires_grad_() for t in operands(name)]
    y = case(name)(*leaves)
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", ["rowwise", True, False, torch.float8_e4m3fn], ids=str)
def test_what_is_no_recipe_is_refused(name, wrong):
    with pytest.raises(
        TypeError, match=r"expected quantize=tpkernels\.Recipe\.rowwise\(\), \.blockwise\(\) or None"
    ):
        case(name, wrong)(*operands(name))


@pytest.mark.parametrize("name", NAMES)
def test_float64_and_tp_invariance_are_refused(name, monkeypatch):
    monkeypatch.setattr(primitives, "quantize", lambda *_: pytest.fail("something was computed"))
    with pytest.raises(TypeError, match=r"bfloat16, float16 or float32 with quantize, got torch\.float64"):
        case(name)(*operands(name, dtype=torch.float64))
    with tp_invariance(4), pytest.raises(ValueError, match="expected no quantize with TP-invariance"):
        case(name)(*operands(name))


GPUS = {  # as torch describes them
    "A100": (
        (8, 0),
        None,
        "expected a GPU of compute capability 8.9 or later with quantize, got A100 of 8.0",
    ),
    "MI300X": (
        (9, 4),
        "6.3",
        r"expected an NVIDIA GPU with quantize, got MI300X: AMD's fp8 has other formats",
    ),
}


@pytest.mark.parametrize("name", GPUS)
def test_gpus_without_our_fp8_are_refused(name, monkeypatch):
    from tpkernels.ops.quantized import limits

    capability, hip, words = GPUS[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(ValueError, match=words):
        limits.require_recipe("linear", Recipe.rowwise(), "cuda:0")
    limits.require_recipe("linear", None, "cuda:0")
    limits.require_recipe("linear", Recipe.rowwise(), "cpu")
    monkeypatch.setattr(torch.version, "hip", None)
    for sound in ((8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, sound=sound: sound)
        limits.require_recipe("linear", Recipe.rowwise(), "cuda:0")


def test_options_of_a_recipe_are_words_it_knows():
    for wrong in ("rowwise+power_of_two=no", "rowwise+head=1", "rowwise+", "columnwise", "rowwise+wgrad"):
        with pytest.raises(ValueError, match="Recipe: expected"):
            Recipe.named(wrong)
    for recipe in (*RECIPES, Recipe.rowwise(power_of_two=True, wgrad="fp8", gradients="e5m2", head=True)):
        assert Recipe.named(str(recipe)) == recipe
