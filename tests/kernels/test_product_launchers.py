"""Products at edges and in every layout a user may bring; for epilogues and forms see test_numerics."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.checks import DTYPES, EMPTY_SHAPES, LAYOUTS, SHAPES, TILE
from tests.kernels.launchers import PRODUCTS, assert_product
from tests.products import once, pairwise
from tpkernels.gate.accuracy import BOUND, relative_error
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reference import dgrad_pairs_ref

FORMS = ("descriptor", "pointer")
OPERANDS = {f"{name}-{word}": (name, word) for name in PRODUCTS for word in PRODUCTS[name].operands}


@pairwise(name=list(PRODUCTS), shape=SHAPES, dtype=DTYPES)
def test_product_matches_float64(name, shape, dtype, device):
    assert_product(name, PRODUCTS[name].random(shape, dtype, device))


@pairwise(form=FORMS, bias=[False, True], parts=[1, 2])
def test_one_loop_over_tiles_and_depth_matches_float64(form, bias, parts, device):
    x, w, b = PRODUCTS["linear"].random(SHAPES["aligned"], torch.bfloat16, device)
    tile = replace(TILE, parts=parts, group=8, flatten=True)
    assert_product("linear", (x, w, b if bias else None), "gelu_tanh", tile, form=form)


@once(operand=OPERANDS, layout=LAYOUTS)
def test_product_takes_any_layout_of_each_operand(operand, layout, device):
    name, word = operand
    tensors = dict(
        zip(
            PRODUCTS[name].operands,
            PRODUCTS[name].random(SHAPES["aligned"], torch.float16, device),
            strict=True,
        )
    )
    one = tensors[word]
    tensors[word] = layout(one) if one.ndim == 2 else layout(one[None].expand(2, -1).contiguous())[1]
    assert_product(name, tensors.values())


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_takes_empty(name, shape, device):
    operands = PRODUCTS[name].random(shape, torch.float32, device)
    ours, exact = PRODUCTS[name].compute(operands, tile=TILE), PRODUCTS[name].exact(operands)
    torch.testing.assert_close(list(ours), list(exact))


def test_only_results_that_are_asked_for_are_kept(device):
    """A pre-activation without activation is the result."""
    kept = {}
    for name in ("linear", "glu", "dgrad_act", "dglu"):
        operands = PRODUCTS[name].random(SHAPES["one_tile"], torch.float32, device)
        unasked = PRODUCTS[name].compute(operands, tile=TILE, **dict.fromkeys(PRODUCTS[name].optional, False))
        kept[name] = [one is not None for one in unasked]
    one, two, three = [True, False], [True, False, False], [True, True, False]
    assert kept == {"linear": one, "glu": two, "dgrad_act": one, "dglu": three}
    y, z = linear_fwd(*PRODUCTS["linear"].random(SHAPES["ragged"], torch.float32, device), keep_z=True)
    assert z is y


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_bias_grad_ignores_rows_past_the_end(device):
    dy, w, z = PRODUCTS["dgrad_act"].random((33, 40, 48), torch.float32, device)
    dy = dy.abs() + 1
    w[:, 3] = float("inf")  # dy * inf is inf on every token, but 0 * inf, past the last token, is NaN
    assert dgrad_act(dy, w, z, "none", bias_grad=True, tile=TILE).db[3] == float("inf")


def pairs(shape, other, dtype, device):
    """Of which the second has `other` out_features."""
    of = PRODUCTS["dgrad_pairs"]
    return [*of.random(shape, dtype, device)[:2], *of.random((*shape[:2], other), dtype, device)[:2]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", [8, 136])
def test_two_products_may_be_of_different_depth(other, form, device):
    assert_product("dgrad_pairs", pairs(SHAPES["aligned"], other, torch.bfloat16, device), form=form)


@pytest.mark.parametrize(("depth", "other"), [(16, 0), (0, 24), (0, 0)])
def test_one_of_two_products_may_be_empty(depth, other, device):
    tensors = pairs((5, 8, depth), other, torch.float32, device)
    torch.testing.assert_close(dgrad_pairs(*tensors, tile=TILE), dgrad_pairs_ref(*tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_sum_of_two_products_is_rounded_once(dtype, device):
    """Where the products nearly cancel, whoever rounds one of them has little left."""
    dy, w = PRODUCTS["dgrad"].random((64, 64, 64), dtype, device)
    near = w + 2**-6 * w.roll(1, 0)
    exact = dgrad_pairs_ref(*(tensor.double() for tensor in (dy, near, -dy, w)))
    assert relative_error(dgrad_pairs(dy, near, -dy, w, tile=TILE), exact) < BOUND[dtype]
    rounded = dgrad(dy, near, tile=TILE) - dgrad(dy, w, tile=TILE)  # the check can fail
    assert relative_error(rounded, exact) > 20 * BOUND[dtype]
