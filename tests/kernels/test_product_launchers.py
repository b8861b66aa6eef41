"""Products at edges and in every layout a user may bring; for epilogues and forms see test_numerics."""

import pytest
import torch

from tests.kernels.checks import DTYPES, EMPTY_SHAPES, LAYOUTS, SHAPES, TILE
from tests.kernels.launchers import PRODUCTS, arguments, assert_product, computed, exact
from tests.products import once, pairwise
from tpkernels.gate.numerics import BOUND, relative_error
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.reference import dgrad_pairs_ref

FORMS = ("descriptor", "pointer")
META = torch.device("meta")
OPERANDS = {
    f"{name}-{word}": (name, word)
    for name in PRODUCTS
    for word, one in arguments(name, (1, 1, 1), torch.float32, META).items()
    if isinstance(one, torch.Tensor)
}


@pairwise(name=list(PRODUCTS), shape=SHAPES, dtype=DTYPES)
def test_product_matches_float64(name, shape, dtype, device):
    assert_product(name, arguments(name, shape, dtype, device))


@once(operand=OPERANDS, layout=LAYOUTS)
def test_product_takes_any_layout_of_each_operand(operand, layout, device):
    name, word = operand
    call = arguments(name, SHAPES["aligned"], torch.float16, device)
    one = call[word]
    call[word] = layout(one) if one.ndim == 2 else layout(one[None].expand(2, -1).contiguous())[1]
    assert_product(name, call)


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_takes_empty(name, shape, device):
    call = arguments(name, shape, torch.float32, device)
    torch.testing.assert_close(list(computed(name, call)), list(exact(name, call)))


def test_only_results_that_are_asked_for_are_kept(device):
    """A pre-activation without activation is the result."""
    for name in ("linear", "glu", "dgrad_act"):
        call = arguments(name, SHAPES["one_tile"], torch.float32, device, asked=False)
        assert [one is not None for one in computed(name, call)][1:] in ([False], [False, False])
    call = arguments("dglu", SHAPES["one_tile"], torch.float32, device)
    assert dglu(*[*call.values()][:4]).h is None
    call = arguments("linear", SHAPES["ragged"], torch.float32, device, "none") | {"keep_z": True}
    y, z = computed("linear", call)
    assert z is y


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_bias_grad_ignores_rows_past_the_end(device):
    call = arguments("dgrad_act", (33, 40, 48), torch.float32, device, "none")
    call["dy"] = call["dy"].abs() + 1
    call["weight"][:, 3] = float(
        "inf"
    )  # dy * inf is inf on every token, but 0 * inf, past the last one, is NaN
    assert computed("dgrad_act", call)[1][3] == float("inf")


def pairs(shape, other, dtype, device):
    """Of which the second has `other` out_features."""
    two = [[*arguments("dgrad", (*shape[:2], depth), dtype, device).values()] for depth in (shape[2], other)]
    return dict(zip(("dy", "weight", "dy2", "weight2"), two[0] + two[1], strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", [8, 136])
def test_two_products_may_be_of_different_depth(other, form, device):
    assert_product("dgrad_pairs", pairs(SHAPES["aligned"], other, torch.bfloat16, device), form=form)


@pytest.mark.parametrize(("depth", "other"), [(16, 0), (0, 24), (0, 0)])
def test_one_of_two_products_may_be_empty(depth, other, device):
    call = pairs((5, 8, depth), other, torch.float32, device)
    torch.testing.assert_close(computed("dgrad_pairs", call), exact("dgrad_pairs", call))


def test_half_of_a_second_product_is_refused(device):
    dy, w, dy2, w2 = pairs((6, 16, 8), 24, torch.float32, device).values()
    for second in ((dy2, None), (None, w2)):
        with pytest.raises(ValueError, match="dgrad: expected dy2 and weight2, or neither"):
            dgrad(dy, w, *second)
    with pytest.raises(ValueError, match=r"dgrad: expected weight2 of shape \(24, 16\)"):
        dgrad(dy, w, dy2, w2[:, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_sum_of_two_products_is_rounded_once(dtype, device):
    """Where the products nearly cancel, whoever rounds one of them has little left."""
    dy, w = arguments("dgrad", (64, 64, 64), dtype, device).values()
    near = w + 2**-6 * w.roll(1, 0)
    truth = dgrad_pairs_ref(*(tensor.double() for tensor in (dy, near, -dy, w)))
    assert relative_error(dgrad(dy, near, -dy, w, tile=TILE), truth) < BOUND[dtype]
    rounded = dgrad(dy, near, tile=TILE) - dgrad(dy, w, tile=TILE)  # the check can fail
    assert relative_error(rounded, truth) > 20 * BOUND[dtype]
