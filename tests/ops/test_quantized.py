"""Ops in fp8 against float64 products of what fp8 holds, by its definition; and against unquantized ones."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.ops.cases import ACT
from tests.ops.quantized_oracle import FORMATS, RECIPES, Oracle, quantized, rounded
from tests.products import once, pairwise
from tpkernels import ops
from tpkernels.dispatch import primitives
from tpkernels.gate.numerics import BOUND, relative_error
from tpkernels.kernels.activations import GATE_OF, act_grad_ref, act_ref
from tpkernels.kernels.recipe import Recipe
from tpkernels.kernels.scaled import DTYPE_OF, Scaled
from tpkernels.ops.quantized.products import Quantized

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
T, K, N, BETWEEN = 37, 200, 136, 152  # a second block that is not full, in each direction


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def operands(dtype: torch.dtype, tokens: int = T) -> list[Tensor]:
    """x, weight, bias, dy"""
    x, weight, bias = random(tokens, K), random(N, K) / K**0.5, random(N)
    return [t.to(dtype) for t in (x, weight, bias, random(tokens, N) * 1e-3)]


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def assert_within(ours: Tensor, exact: Tensor, what: str, times: float = 1.0) -> None:
    error = relative_error(ours.detach(), exact)
    assert error <= times * BOUND[ours.dtype], f"{what}: {error:.2e}"


def test_rounding_of_the_oracle_is_that_of_each_number_of_a_format():
    """All 256 of torch's, their midpoints, and what lies next to these."""
    for name, dtype in DTYPE_OF.items():
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        codes = codes[codes.isfinite()].unique()
        assert codes.max() == FORMATS[name][2]
        middle = (codes[1:] + codes[:-1]) / 2
        x = torch.cat([codes, middle, middle * (1 + 1e-6), middle * (1 - 1e-6)])
        assert rounded(x, name).equal(x.float().to(dtype).double()), name


def _few_times(factor: float) -> Tensor:
    """Of 8 features."""
    return torch.cat([torch.full((8,), factor), torch.ones(K - 8)])


HARD = {  # numbers by which normal ones are multiplied
    "normal": lambda: 1.0,
    "log-normal sizes": lambda: torch.exp(2 * random(T, K)),
    "8 features times 100": lambda: _few_times(1e2),
    "8 features times 100,000": lambda: _few_times(1e5),
    "every second row zero": lambda: torch.arange(T)[:, None] % 2,
    "rows of 1e30": lambda: 1e30,
    "rows of 1e-30": lambda: 1e-30,
    "rows of 1e-40": lambda: 1e-40,
    "subnormal": lambda: 1e-42,
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("square", [False, True])
def test_quantized_numbers_are_those_of_the_definition(name, square):
    """To the bit, of both formats and every kind of scale."""
    x = random(T, K) * HARD[name]()
    for recipe, format in product(RECIPES.values(), FORMATS):
        if square and recipe.scaling != "blocks":
            continue
        words = primitives.quantize(x, None, "none", format, recipe.scaling, recipe.power_of_two, square)
        ours = Scaled(words, K, format, recipe.scaling)
        found = primitives.dequantize(ours.data, ours.scale, "float64")
        torch.testing.assert_close(
            found, quantized(x, format, recipe, square), rtol=0, atol=0, equal_nan=True, msg=f"{recipe}"
        )


@pairwise(recipe=RECIPES, dtype=DTYPES, activation=[None, "gelu"])
def test_linear_is_the_product_of_what_fp8_holds(recipe, dtype, activation):
    oracle = Oracle(recipe)
    x, weight, bias, dy = operands(dtype)
    leaves = leaves_of([x, weight, bias])
    y = ops.linear(*leaves, activation, quantize=recipe)
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    assert_within(y, ACT[activation](oracle.linear(x, weight, bias)), "y")
    z = ops.linear(x, weight, bias, quantize=recipe)
    dz = act_grad_ref(dy, z, activation or "none")
    assert_within(dx, oracle.dgrad(dz, weight), "dx")
    assert_within(dw, oracle.wgrad(dz, x), "dw")
    assert_within(db, dz.double().sum(0), "db", times=2)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype,) * 4


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, activation):
        ctx.save_for_backward(z)
        ctx.activation = activation
        return act_ref(z, activation)

    @staticmethod
    def backward(ctx, dh):
        return act_grad_ref(dh, *ctx.saved_tensors, ctx.activation), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, u, gate):
        ctx.save_for_backward(g, u)
        ctx.gate = gate
        return act_ref(g, gate) * u

    @staticmethod
    def backward(ctx, dh):
        g, u = ctx.saved_tensors
        return act_grad_ref(dh * u, g, ctx.gate), dh * act_ref(g, ctx.gate), None


@once(recipe=RECIPES, dtype=DTYPES)
def test_other_ops_are_made_of_linear(recipe, dtype):
    """Results and gradients; dx of two products is their sum, rounded once, and an MLP quantizes what lies
    between its products before that is rounded to 16 bits.
    """
    oracle = Oracle(recipe)
    x, gate, up, down, b_up, b_down = (
        random(*shape, dtype=dtype)
        for shape in ((T, K), (BETWEEN, K), (BETWEEN, K), (N, BETWEEN), (BETWEEN,), (N,))
    )

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, weight, bias, quantize=recipe)

    def gated(x: Tensor, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        return _Gated.apply(linear(x, gate), linear(x, up), GATE_OF[kind])

    cases = {
        "mlp": (
            partial(ops.mlp, activation="gelu", quantize=recipe),
            lambda x, up, b, down, c: linear(_Act.apply(linear(x, up, b), "gelu"), down, c),
            [x, up, b_up, down, b_down],
        ),
        "swiglu": (
            partial(ops.swiglu, quantize=recipe),
            partial(gated, kind="swiglu"),
            [x, gate, up],
        ),
        "gated mlp": (
            lambda x, g, u, d, c: ops.mlp(
                x, u, None, d, c, w_gate=g, activation="geglu_tanh", quantize=recipe
            ),
            lambda x, g, u, d, c: linear(gated(x, g, u, "geglu_tanh"), d, c),
            [x, gate, up, down, b_down],
        ),
    }
    for name, (op, composed, given) in cases.items():
        found = []
        for function in (op, composed):
            leaves = leaves_of(given)
            y = function(*leaves)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
        for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
            if i == 1 and name != "mlp":
                assert_within(ours, theirs, f"{name}, dx", times=2)
            elif i == 0 and "mlp" in name and dtype != torch.float32:
                h = act_ref(linear(x, up, b_up).float(), "gelu")
                if name != "mlp":
                    h = act_ref(linear(x, gate).float(), "gelu_tanh") * linear(x, up)
                assert_within(ours, oracle.linear(h, down, b_down), f"{name}, y")
            else:
                assert ours.equal(theirs), f"{name}, {i}"


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "rowwise, wgrad fp8, e5m2"])
@pytest.mark.parametrize(
    "shape", [(0, 8, 8), (0, 300, 8), (1, 1, 1), (1, 7, 3), (5, 129, 1), (3, 0, 5), (300, 5, 257), (2, 8, 0)]
)
def test_any_sizes(shape, recipe):
    tokens, features, out = shape
    oracle = Oracle(RECIPES[recipe])
    x, weight, dy = random(tokens, features), random(out, features), random(tokens, out)
    leaves = leaves_of([x, weight])
    y = ops.linear(*leaves, quantize=RECIPES[recipe])
    dx, dw = torch.autograd.grad(y, leaves, dy)
    for ours, exact in (
        (y.detach(), oracle.linear(x, weight)),
        (dx, oracle.dgrad(dy, weight)),
        (dw, oracle.wgrad(dy, x)),
    ):
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.norm()))


BAD = [float("nan"), float("inf"), -float("inf")]


@pairwise(bad=BAD, recipe=RECIPES, where=["x", "weight", "dy"])
def test_what_is_no_number_is_kept(where, recipe, bad):
    """No element is finite that is not in torch's product; and which others are lost with it."""
    given = dict(zip(("x", "weight", "bias", "dy"), operands(torch.float32, tokens=3), strict=True))
    given[where][1, 130] = bad
    found = []
    for quantize in (None, recipe):
        leaves = leaves_of([given[name] for name in ("x", "weight", "bias")])
        y = ops.linear(*leaves, quantize=quantize) if quantize else torch.nn.functional.linear(*leaves)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, given["dy"][:, :N])])
    for theirs, ours in zip(*found, strict=True):
        assert not (ours.isfinite() & ~theirs.isfinite()).any()
    if where == "weight" and recipe.scaling == "blocks":  # a block of 128 x 128 shares its scale
        y, dx = found[1][:2]
        assert y.isfinite().all(0).nonzero().flatten().tolist() == list(range(128, N))
        assert dx.isfinite().all(0).nonzero().flatten().tolist() == list(range(128))
    else:  # elsewhere rows and columns that torch loses in part or in full are lost in full
        for theirs, ours in zip(*found, strict=True):
            lost = ~theirs.isfinite()
            if ours.ndim == 2:
                rows, columns = lost.any(1), lost.any(0)
                assert ours[~rows][:, ~columns].isfinite().all()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_what_overflows_in_torch_overflows_here_and_what_is_tiny_does_not_vanish(recipe):
    """Scales of 1e-30 and 1e-10 have a product of zero in fp32: sums are multiplied by one after another."""
    x, weight = random(T, K) * 1e-30, random(N, K) * 1e-7
    y = ops.linear(x, weight, quantize=RECIPES[recipe])
    assert_within(y * 2.0**60, Oracle(RECIPES[recipe]).linear(x, weight) * 2.0**60, "y")
    for size, dtype in ((1e30, torch.float32), (300.0, torch.float16)):
        x, weight = (torch.full((rows, K), size, dtype=dtype) for rows in (2, 3))
        assert ops.linear(x, weight, quantize=RECIPES[recipe]).tolist() == [[float("inf")] * 3] * 2


@pytest.mark.parametrize("features", [64, 256])
def test_powers_of_two_keep_the_largest_number_finite(features, backend):
    """And what zeros make of it zero."""
    largest = torch.finfo(torch.float32).max
    x, w = torch.zeros(2, features), torch.zeros(8, features)
    x[0, 0], w[1, 0] = largest, 2.0**-100
    x, w = x.requires_grad_(), w.requires_grad_()
    y = ops.linear(x, w, None, quantize=Recipe.blockwise(power_of_two=True))
    dx, dw = torch.autograd.grad(y, (x, w), torch.full_like(y, 0.5))
    right = torch.zeros(2, 8)
    right[0, 1] = largest * 2.0**-100
    torch.testing.assert_close(y, right, rtol=0.07, atol=0)
    torch.testing.assert_close(dw[:, 0], torch.full((8,), largest / 2), rtol=0.07, atol=0)
    assert dx.isfinite().all()


@pytest.mark.parametrize("wrong", [lambda scale: scale.roll(1, 0), lambda scale: scale * 1.125])
def test_a_wrong_scale_would_be_seen(monkeypatch, wrong):
    """That of the row before; and one an eighth off, which fp8 itself could be."""
    x, weight, bias, _ = operands(torch.bfloat16)
    exact = Oracle(Recipe.rowwise()).linear(x, weight, bias)

    compute = Quantized._product_into

    def spoilt(matmul, out, words, *others):
        changed = Scaled(words.clone(), K, "e4m3", "rows")
        changed.scale.copy_(wrong(changed.scale.clone()))
        compute(matmul, out, changed.words, *others)

    monkeypatch.setattr(Quantized, "_product_into", spoilt)
    y = ops.linear(x, weight, bias, quantize=Recipe.rowwise())
    assert relative_error(y, exact) > 10 * BOUND[torch.bfloat16]


@pytest.fixture
def scaled_products(monkeypatch):
    """The operands of each product in fp8."""
    found, compute, compute_into = [], primitives.scaled_linear, primitives.into

    def spied(*operands):
        found.append(operands)
        return compute(*operands)

    def spied_into(primitive, out, *operands):
        found.append(operands)
        compute_into(compute, out, *operands)

    monkeypatch.setattr(primitives, "scaled_linear", spied)
    monkeypatch.setattr(primitives, "into", spied_into)
    return found


FAST = {  # of forward, dgrad and wgrad
    Recipe.rowwise(wgrad="fp8"): [True, False, False],
    Recipe.rowwise(wgrad="fp8", fast_accumulate="never"): [False, False, False],
    Recipe.rowwise(wgrad="fp8", fast_accumulate="always"): [True, True, True],
    Recipe.blockwise(): [False, False],
}


@pytest.mark.parametrize("recipe", FAST, ids=str)
@pytest.mark.parametrize("op", ["linear", "mlp", "gated mlp"])
def test_the_recipe_says_which_products_accumulate_fast(op, recipe, scaled_products):
    """Also those of a layer with two products, and where gradients of two products are added."""
    x, up, gate, down = leaves_of([random(5, 48), random(64, 48), random(64, 48), random(48, 64)])
    products, call = {
        "linear": (1, partial(ops.linear, x, up)),
        "mlp": (2, partial(ops.mlp, x, up, None, down, None)),
        "gated mlp": (3, partial(ops.mlp, x, up, None, down, None, w_gate=gate)),
    }[op]
    y = call(quantize=recipe)
    forward = [operands[-1] for operands in scaled_products]
    scaled_products.clear()
    y.sum().backward()
    of_x = [operands[-1] for operands in scaled_products if operands[0].shape[0] == 5]
    of_weights = [operands[-1] for operands in scaled_products if operands[0].shape[0] != 5]
    assert forward == FAST[recipe][:1] * products
    assert of_x == FAST[recipe][1:2] * products
    assert of_weights == FAST[recipe][2:] * products


def test_products_take_one_scale_for_each_square_of_a_weight(scaled_products):
    """One for each row, of which 128 are equal, would cost a kernel twice the cycles."""
    for recipe in ("rowwise", "blockwise"):
        x, weight = leaves_of([random(5, 300), random(257, 300)])
        ops.linear(x, weight, quantize=RECIPES[recipe]).sum().backward()
    shapes = [tuple(tuple(scale.shape) for scale in operands[2:4]) for operands in scaled_products]
    assert shapes == [((5, 1), (257, 1)), ((5, 1), (300, 1)), *[((5, 3), (3, 3))] * 2]
