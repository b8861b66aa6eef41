"""Second derivatives: of local ops and regions those of torch, of other ops an error for every input."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jvp, vhp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ops import second_cases
from tests.ops.cases import CASES
from tpkernels import ops

Op = Callable[..., Tensor]
K, BETWEEN, N = 3, 4, 2
TINY = {24: K, 40: BETWEEN, 16: N}  # the features of `tests.ops.cases`

OPS: dict[str, tuple[Op, Op, tuple[tuple[int, ...], ...]]] = {  # ours, torch's, shapes of parameters
    **{
        name: (case.op, case.plain, tuple(tuple(TINY[size] for size in shape) for shape in case.shapes))
        for name, case in CASES.items()
    },
    "rms_norm": (ops.rms_norm, lambda x, w: F.rms_norm(x, (K,), w, 1e-5), ((K,),)),
    "layer_norm": (ops.layer_norm, lambda x, w, b: F.layer_norm(x, (K,), w, b, 1e-5), ((K,), (K,))),
    "layer_norm_without_bias": (ops.layer_norm, lambda x, w: F.layer_norm(x, (K,), w, None, 1e-5), ((K,),)),
}
SOME = ["linear_None", "linear_gelu", "mlp_gelu_tanh", "swiglu", "mlp_swiglu", "rms_norm", "layer_norm"]


def operands(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((2, K), *OPS[name][2])]


def loss(op: Op) -> Op:
    return lambda *tensors: op(*tensors).square().sum()


def penalized(op: Op, tensors: list[Tensor], wanted: tuple[bool, ...], **options: Any) -> list[Tensor | None]:
    """The gradients of a loss, and those of the squares of these gradients."""
    leaves = [t.clone().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    first = torch.autograd.grad(op(*leaves).sin().sum(), asked, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in first)
    return [*first, *torch.autograd.grad(penalty, asked, **options)]  # type: ignore[arg-type]


def assert_same(ours: Any, theirs: Any, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, **(tolerance or {"rtol": 1e-10, "atol": 1e-10}))


@pytest.mark.parametrize("name", OPS)
def test_hessian_is_that_of_torch(name):
    op, plain, _ = OPS[name]
    given = operands(name)
    assert_same(hessian(loss(op), tuple(given)), hessian(loss(plain), tuple(given)))


@pytest.mark.parametrize("name", SOME)
def test_each_combination_of_required_gradients(name, backend):
    """Whatever is frozen, and so not saved; of a bias alone, too."""
    op, plain, _ = OPS[name]
    given = operands(name, torch.float32)
    for wanted in product([False, True], repeat=len(given)):
        # the interpreter is slow: all of them, and each alone
        if any(wanted) and (backend == "torch" or sum(wanted) in (1, len(given))):
            assert_same(
                penalized(op, given, wanted, allow_unused=True),
                penalized(plain, given, wanted, allow_unused=True),
                rtol=1e-3,
                atol=1e-3,
            )


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_gradients_are_those_of_finite_differences(name):
    given = [t.requires_grad_() for t in operands(name)]
    assert torch.autograd.gradgradcheck(OPS[name][0], given)


def layer_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5) * weight + bias


@pytest.mark.parametrize("name", ["linear_silu", "mlp_gelu", "mlp_geglu_tanh", "layer_norm"])
def test_third_derivatives(name):
    """F.layer_norm's of x is wrong (torch 2.13): it takes mean and rstd for constants."""

    def third(op: Op) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in given]
        value = op(*leaves).sin().sum()
        for _ in range(2):
            value = sum(g.square().sum() for g in torch.autograd.grad(value, leaves, create_graph=True))
        return torch.autograd.grad(value, leaves)

    given = operands(name)
    plain = layer_norm_by_hand if name == "layer_norm" else OPS[name][1]
    assert_same(third(OPS[name][0]), third(plain), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", SOME)
def test_products_with_jacobians_and_hessians(name):
    """torch.autograd.functional's: its jvp differentiates a gradient by the gradient that came in."""
    op, plain, _ = OPS[name]
    given = tuple(operands(name))
    for product_of in (hvp, vhp):
        assert_same(product_of(loss(op), given, given), product_of(loss(plain), given, given))
    assert_same(jvp(op, given, given), jvp(plain, given, given))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("name", SOME)
def test_training_with_a_gradient_penalty(name):
    """backward(create_graph=True), then an optimizer."""

    def trained(op: Op) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        optimizer = torch.optim.SGD(leaves, lr=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            first = torch.autograd.grad(op(*leaves).square().sum(), leaves, create_graph=True)
            (op(*leaves).sum() + sum(g.square().sum() for g in first)).backward(create_graph=True)
            optimizer.step()
        return leaves

    given = operands(name)
    assert_same(trained(OPS[name][0]), trained(OPS[name][1]))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("name", SOME)
def test_first_gradients_with_a_graph_are_those_without(name, backend):
    given = operands(name, torch.float32)
    leaves, others = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    OPS[name][0](*leaves).square().sum().backward(create_graph=True)
    OPS[name][0](*others).square().sum().backward()
    assert_same([t.grad for t in leaves], [t.grad for t in others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_checkpointed_ops(name):
    op, plain, _ = OPS[name]
    given = operands(name)
    everything = (True,) * len(given)

    def recomputed(*tensors: Tensor) -> Tensor:
        return checkpoint(op, *tensors, use_reentrant=False)

    assert_same(penalized(recomputed, given, everything), penalized(plain, given, everything))


@pytest.mark.parametrize("transform", ["grad", "hessian", "jacrev", "jacfwd", "jvp", "vmap of grad"])
@pytest.mark.parametrize("name", SOME)
def test_functorch_is_refused(name, transform):
    """As torch refuses every autograd.Function that has no setup_context."""
    value = loss(OPS[name][0])
    x, *others = operands(name)
    calls: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(value)(x, *others),
        "hessian": lambda: torch.func.hessian(value)(x, *others),
        "jacrev": lambda: torch.func.jacrev(value)(x, *others),
        "jacfwd": lambda: torch.func.jacfwd(value)(x, *others),
        "jvp": lambda: torch.func.jvp(lambda x: value(x, *others), (x,), (x,)),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda x: value(x, *others)))(x[:, None]),
    }
    with pytest.raises(RuntimeError, match="setup_context"):
        calls[transform]()


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("wanted", [True, False])
def test_forward_mode_under_compile_is_refused(name, wanted):
    """A registered operator would drop the tangent; also if it was compiled before there were any."""
    compiled = torch.compile(OPS[name][0], backend="aot_eager")
    x, *others = operands(name)
    assert_same(compiled(x, *others), OPS[name][0](x, *others))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        compiled(forward_ad.make_dual(x.clone().requires_grad_(wanted), x), *others)


@pytest.mark.parametrize("name", SOME)
def test_compiled_op_has_no_second_derivative(name):
    compiled = torch.compile(OPS[name][0], backend="aot_eager")
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        hessian(loss(compiled), tuple(operands(name)))


def test_second_derivatives_keep_no_more_memory():
    """The z that comes out beside y is the one that is saved."""
    x, weight, bias = (t.requires_grad_() for t in operands("linear_gelu"))
    saved = ops.linear(x, weight, bias, "gelu").grad_fn.saved_tensors
    assert [tuple(t.shape) for t in saved] == [(2, K), (N, K), (2, N)]


@pytest.mark.parametrize("name", second_cases.OPS)
@pytest.mark.parametrize("world", ["ranks1", "ranks2"])
def test_ops_over_a_group_refuse_for_every_input(request, world, name):
    for found in request.getfixturevalue(world).run(second_cases.refusals, name):
        assert found == dict.fromkeys(found, "refused")
        assert len(found) > 2


@pytest.mark.parametrize("name", second_cases.OPS)
def test_first_gradients_with_a_graph_over_a_group(ranks2, name):
    assert ranks2.run(second_cases.unlike_with_graph, name) == [[], []]


def test_inputs_out_of_reach_and_main_grad_are_refused_at_once(ranks2):
    for found in ranks2.run(second_cases.refused_at_once):
        assert found == dict.fromkeys(found, "refused")


def test_regions_have_second_derivatives(ranks2):
    for wrong in ranks2.run(second_cases.wrong_penalties):
        assert not wrong
