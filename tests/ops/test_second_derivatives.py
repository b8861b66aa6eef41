"""Second derivatives: of local ops and regions those of torch, of other ops an error for every input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.on_ranks import on_ranks
from tests.ops.cases import CASES, NORMS
from tests.ops.parallel_behaviour import message_of
from tests.ops.parallel_cases import shard
from tests.products import once
from tpkernels.comm.calls import calls_of
from tpkernels.ops import (
    Norm,
    column_linear,
    linear_cross_entropy,
    linear_logprobs,
    row_linear,
    vocab_cross_entropy,
)
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.vocab.embedding import vocab_embedding

WORDS = "expected to be differentiated once, got a second derivative"
TOKENS, K, N, VOCAB = 4, 4, 4, 8


def _ids(seed: int) -> Tensor:
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def _classes(group: dist.ProcessGroup) -> Tensor:
    return torch.arange(1.0, 1.0 + VOCAB * group.size())


Op = Callable[..., Tensor]
X, W, B = (TOKENS, K), (N, K), (N,)
OPS: dict[str, tuple[Op, tuple[tuple[int, ...], ...]]] = {  # of a group and tensors, and the shapes of these
    "column": (lambda g, x, w, b: column_linear(x, w, b, g), (X, W, B)),
    "column_gelu": (lambda g, x, w, b: column_linear(x, w, b, g, activation="gelu"), (X, W, B)),
    "column_sequence": (
        lambda g, x, w, b: column_linear(x, w, b, g, activation="silu", sequence_parallel=True), (X, W, B)
    ),
    "row": (lambda g, x, w, b: row_linear(x, w, b, g), (X, W, B)),
    "row_sequence": (lambda g, x, w, b: row_linear(x, w, b, g, sequence_parallel=True), (X, W, B)),
    "row_norm": (
        lambda g, x, w, b, r, n: torch.mul(*row_linear(x, w, b, g, residual=r, norm=Norm(n))),
        (X, W, B, (TOKENS, N), (N,)),
    ),
    "mlp_norm": (
        lambda g, x, wu, wd, bd, r, n: parallel_mlp(x, wu, None, wd, bd, g, residual=r, norm=Norm(n))[1],
        (X, W, (K, N), (K,), X, (K,)),
    ),
    "mlp": (lambda g, x, wu, bu, wd, bd: parallel_mlp(x, wu, bu, wd, bd, g), (X, W, B, (K, N), (K,))),
    "gated_mlp": (
        lambda g, x, wu, wg, wd, bd: parallel_mlp(x, wu, None, wd, bd, g, w_gate_shard=wg),
        (X, W, W, (K, N), (K,)),
    ),
    "embedding": (lambda g, w: vocab_embedding(_ids(0), w, g), ((VOCAB, K),)),
    "cross_entropy": (lambda g, logits: vocab_cross_entropy(logits, _ids(1), g), ((TOKENS, VOCAB),)),
    "weighted_cross_entropy": (
        lambda g, logits: vocab_cross_entropy(logits, _ids(1), g, class_weight=_classes(g), z_loss=0.1),
        ((TOKENS, VOCAB),),
    ),
    "head_with_all_terms": (
        lambda g, h, w, b: linear_cross_entropy(
            h, w, _ids(1), g, bias_shard=b, softcap=2.0, class_weight=_classes(g), z_loss=0.1
        ),
        (X, (VOCAB, K), (VOCAB,)),
    ),
    "head_mean": (lambda g, h, w: linear_cross_entropy(h, w, _ids(1), g), (X, (VOCAB, K))),
    "head_none": (lambda g, h, w: linear_cross_entropy(h, w, _ids(1), g, reduction="none"), (X, (VOCAB, K))),
    "logprobs": (lambda g, h, w: linear_logprobs(h, w, _ids(1), g, temperature=2.0)[0], (X, (VOCAB, K))),
}  # fmt: skip


def _operands(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(shape, generator=generator) for shape in OPS[name][1]]


LINEAR_IN = {"column": 2, "row": 2, "row_sequence": 2, "mlp": 4, "gated_mlp": 4, "embedding": 0}


def _square(y: Tensor) -> Tensor:
    return y.square().sum()


def _penalty(op: Op, leaves: list[Tensor], number: int, loss: Op = _square) -> None:
    """A penalty on all gradients, differentiated by one input alone, which may be unused."""
    first = torch.autograd.grad(loss(op(*leaves)), [t for t in leaves if t.requires_grad], create_graph=True)
    torch.autograd.grad(
        torch.stack([g.square().sum() for g in first]).sum(), leaves[number], allow_unused=True
    )


@once(world=["ranks1", "ranks2"], name=list(OPS))
@on_ranks()
def test_ops_over_a_group_refuse_for_every_input(name):
    """Whatever way a second derivative is asked for."""
    op, given = partial(OPS[name][0], dist.group.WORLD), _operands(name)

    def fresh(only: int | None = None) -> list[Tensor]:
        return [t.clone().requires_grad_(only in (None, i)) for i, t in enumerate(given)]

    def computed(*tensors: Tensor) -> Tensor:
        return op(*(t * 1 for t in tensors))

    recomputed, value = partial(checkpoint, op, use_reentrant=False), loss(op)
    calls: dict[str, Callable[[], object]] = {
        "hessian": lambda: hessian(value, tuple(given)),
        "hvp": lambda: hvp(value, tuple(given), tuple(given)),
    }
    for number in range(len(given)):
        for kind, function, only in (
            ("plain", op, None),
            ("others frozen", op, number),
            ("no leaves", computed, None),
            ("checkpointed", recomputed, None),
        ):
            calls[f"{kind} {number}"] = partial(_penalty, function, fresh(only), number)
        if LINEAR_IN.get(name) != number:  # else the true answer is that it is unused
            calls[f"constant gradient {number}"] = partial(_penalty, op, fresh(), number, torch.sum)
    for kind, call in calls.items():
        assert WORDS in message_of(call), kind
    ranks = range(1, dist.get_world_size() + 1)  # which are of use still
    total = mappings.reduce_from_region(torch.tensor([dist.get_rank() + 1.0]), dist.group.WORLD)
    assert total.item() == sum(ranks)


@on_ranks(2)
def test_first_gradients_with_a_graph_over_a_group_have_the_bits_of_those_without():
    for name, (op, _) in OPS.items():
        plain, with_graph = [], []
        for found, create_graph in ((plain, False), (with_graph, True)):
            leaves = [t.requires_grad_() for t in _operands(name)]
            y = _square(op(dist.group.WORLD, *leaves))
            found += torch.autograd.grad(y, leaves, create_graph=create_graph)
        assert all(gradient.requires_grad for gradient in with_graph), name
        assert all(map(torch.equal, plain, with_graph)), name


@on_ranks(2)
def test_inputs_out_of_reach_and_main_grad_are_refused_at_once():
    """With create_graph=True alone, where nothing could be raised later."""
    group = dist.group.WORLD
    x, w, b = (t.requires_grad_() for t in _operands("column"))
    computed, target, into = b * 1, _ids(1) % N, torch.zeros(N, K)
    at_once, fused = "This is raised already now", "expected no create_graph=True with main_grad"
    for y, words in (
        (column_linear(x, w, computed, group, activation="gelu"), at_once),
        (column_linear(x * 1, w, b, group, sequence_parallel=True, save_gathered=True), at_once),
        (parallel_mlp(x, w, computed, w, b, group), at_once),
        (parallel_mlp(x * 1, *(t.detach() for t in (w, b, w, b)), group), at_once),
        (column_linear(x, w, b, group, main_grad=into), fused),
        (row_linear(x, w, b, group, main_grad=into), fused),
        (parallel_mlp(x, w, b, w, b, group, main_grads=[into, None]), fused),
        (linear_cross_entropy(x, w, target, group, main_grad=into), fused),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(_square(y), x, create_graph=True)
        assert not into.any(), "added to main_grad before it was refused"
    for y in (  # weights are not saved where x needs no gradient
        column_linear(x.detach(), w * 1, b, group, activation="gelu"),
        parallel_mlp(x.detach(), w * 1, b, w, b, group),
    ):
        with pytest.raises(RuntimeError, match=at_once):
            torch.autograd.grad(_square(y), w, create_graph=True)
    y = column_linear(x * 1, w.detach(), computed, group)  # dx depends on nothing that forward computed
    (dx,) = torch.autograd.grad(_square(y), x, create_graph=True)
    assert WORDS in message_of(lambda: torch.autograd.grad(dx.sum(), x))


@pytest.mark.parametrize("most", [0, 2**20])
@on_ranks(2)
def test_a_second_derivative_is_refused_whatever_a_message_holds(most):
    """Of few rows the gathered x is kept, of which autograd does not know that it depends on x."""
    group = dist.new_group()
    calls_of(group).eager_bytes = most
    x, w, b = (t.requires_grad_() for t in _operands("column"))
    y = column_linear(x * 1, w, b, group, sequence_parallel=True)
    (dw,) = torch.autograd.grad(y, w, torch.ones_like(y), create_graph=True)  # of dy nothing depends on x
    assert WORDS in message_of(lambda: torch.autograd.grad(dw.sum(), x))


def _whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _split_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An MLP between two regions."""
    group = dist.group.WORLD
    h = F.gelu(F.linear(mappings.copy_to_region(x, group), shard(up, 0)))
    return mappings.reduce_from_region(F.linear(h, shard(down, 1)), group)


def _split_tokens(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same under sequence parallelism, from and to all tokens."""
    group = dist.group.WORLD
    x = mappings.scatter_to_sequence_region(x, group)
    x = mappings.gather_from_sequence_region(x, group)
    y = F.linear(F.gelu(F.linear(x, shard(up, 0))), shard(down, 1))
    y = mappings.reduce_scatter_to_sequence_region(y, group)
    return mappings.gather_from_sequence_region(y, group, tensor_parallel_output_grad=False)


def _split_between(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Features are split where they are gated, and whole where they are multiplied."""
    group = dist.group.WORLD
    z = mappings.scatter_to_region(F.linear(x, up), group)
    return F.linear(mappings.gather_from_region(F.gelu(z) * z, group), down)


@pytest.mark.parametrize("split", [_split_features, _split_tokens, _split_between])
@on_ranks(2)
def test_regions_have_second_derivatives(split):
    """Gradients of a penalty on dx are those of the unsharded model.

    Weights are given whole and cut within: the gradient of each is zero but for our shard, or whole.
    """

    def whole(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        z = F.linear(x, up)
        return F.linear(F.gelu(z) * z if split is _split_between else F.gelu(z), down)

    found = []
    for model in (split, whole):
        leaves = [t.requires_grad_() for t in (_whole(0, 8, 6), _whole(1, 8, 6), _whole(2, 6, 8))]
        value = model(*leaves).sin().sum()
        (dx,) = torch.autograd.grad(value, leaves[0], create_graph=True)
        found.append([dx, *torch.autograd.grad(value + dx.square().sum(), leaves)])
    for name, ours, truth in zip(("dx", "x", "up", "down"), *found, strict=True):
        if split is not _split_between and name in ("up", "down"):
            dim = int(name == "down")
            ours, truth = shard(ours, dim), shard(truth, dim)
        assert_same(ours, truth, rtol=1e-12, atol=1e-12)


LOCAL = CASES | NORMS
SOME = ["linear_None", "linear_gelu", "mlp_gelu_tanh", "swiglu", "mlp_swiglu", "rms_norm", "layer_norm"]
TINY = {24: 3, 40: 4, 16: 2}  # for the features of `tests.ops.cases`


def operands(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(2, 3), *(tuple(TINY[size] for size in shape) for shape in LOCAL[name].shapes)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


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


@pytest.mark.parametrize("name", SOME)
def test_each_combination_of_required_gradients(name, backend):
    """Gradients and those of their squares, whatever is frozen, and so not saved; of a bias alone, too."""
    op, plain = LOCAL[name].op, LOCAL[name].plain
    given = operands(name, torch.float32)
    for wanted in product([False, True], repeat=len(given)):
        # the interpreter is slow: all of them, and each alone
        if any(wanted) and (backend == "torch" or sum(wanted) in (1, len(given))):
            expected = penalized(plain, given, wanted, allow_unused=True)
            found = penalized(op, given, wanted, allow_unused=True)
            assert_same(found, expected, rtol=1e-3, atol=1e-3)
    recomputed = penalized(partial(checkpoint, op, use_reentrant=False), given, wanted)
    assert_same(recomputed, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LOCAL)
def test_gradients_of_gradients_are_those_of_finite_differences(name):
    """By operands and by the gradient that comes in."""
    given = [t.requires_grad_() for t in operands(name)]
    assert torch.autograd.gradgradcheck(LOCAL[name].op, given)


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
    plain = layer_norm_by_hand if name == "layer_norm" else LOCAL[name].plain
    assert_same(third(LOCAL[name].op), third(plain), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", SOME)
def test_functorch_is_refused(name):
    """As torch refuses every autograd.Function that has no setup_context."""
    x, *others = operands(name)

    def of_x(x: Tensor) -> Tensor:
        return loss(LOCAL[name].op)(x, *others)

    func = torch.func
    asked = [transform(of_x) for transform in (func.grad, func.hessian, func.jacrev, func.jacfwd)]
    asked += [lambda x: func.jvp(of_x, (x,), (x,)), lambda x: func.vmap(func.grad(of_x))(x[:, None])]
    for call in asked:
        with pytest.raises(RuntimeError, match="setup_context"):
            call(x)


@pytest.mark.parametrize("name", OPS)
@on_ranks(2)
def test_functorch_is_refused_over_a_group_which_lives_on(name):
    """Before anything is sent, also where nothing needs a gradient."""
    group, (op, _), (x, *others) = dist.new_group(), OPS[name], _operands(name)

    def of_x(x: Tensor) -> Tensor:
        return op(group, x, *others).sum()

    for call in (torch.vmap(of_x, randomness="same"), torch.func.grad(lambda x: of_x(x[0]))):
        with pytest.raises(NotImplementedError, match=r"expected no transform of torch.func \(vmap, grad"):
            call(x[None])
    assert of_x(x).isfinite()


@pytest.mark.parametrize("name", ["linear_gelu", "swiglu", "mlp_swiglu", "layer_norm"])
def test_forward_mode_under_compile_is_refused(name):
    """A registered operator would drop the tangent; also if it was compiled before there were any."""
    compiled = torch.compile(LOCAL[name].op, backend="aot_eager")
    x, *others = operands(name)
    assert_same(compiled(x, *others), LOCAL[name].op(x, *others))
    for wanted in (True, False):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            compiled(forward_ad.make_dual(x.clone().requires_grad_(wanted), x), *others)


@pytest.mark.parametrize("name", ["linear_gelu", "mlp_swiglu"])
def test_compiled_op_has_no_second_derivative(name):
    compiled = torch.compile(LOCAL[name].op, backend="aot_eager")
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        hessian(loss(compiled), tuple(operands(name)))
