"""`dgrad_pairs` against float64, and that its two products meet in one accumulator."""

import pytest
import torch

from tests.kernels.checks import DTYPES, LAYOUTS, SHAPES, TILE, assert_accurate, dense, normal
from tpkernels.gate.accuracy import BOUND, relative_error
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.reference import dgrad_pairs_ref


def operands(shape, dtype, device, other_out=None):
    """dy, weight, dy2, weight2, of which the second pair may have other out_features."""
    tokens, in_features, out_features = shape
    widths = (out_features, out_features if other_out is None else other_out)
    return [
        tensor
        for width in widths
        for tensor in (
            normal(tokens, width, dtype, device),
            normal(width, in_features, dtype, device) / max(width, 1) ** 0.5,
        )
    ]


def assert_right(tensors, form=None):
    ours = dgrad_pairs(*tensors, tile=TILE, form=form)
    exact = dgrad_pairs_ref(*(tensor.double() for tensor in tensors))
    assert_accurate(ours, exact, dgrad_pairs_ref(*map(dense, tensors)), "dx")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dgrad_pairs_matches_float64(shape, dtype, device):
    assert_right(operands(shape, dtype, device))


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
@pytest.mark.parametrize("other", [8, 136])
def test_dgrad_pairs_takes_weights_of_other_out_features(other, form, device):
    assert_right(operands(SHAPES["aligned"], torch.bfloat16, device, other), form)


@pytest.mark.parametrize("which", range(4), ids=["dy", "weight", "dy2", "weight2"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_dgrad_pairs_takes_any_layout(layout, which, device):
    tensors = operands(SHAPES["aligned"], torch.float16, device)
    tensors[which] = layout(tensors[which])
    assert_right(tensors)


@pytest.mark.parametrize("shape", [(0, 8, 16), (5, 0, 16), (5, 8, 0)], ids=str)
@pytest.mark.parametrize("other", [0, 24])
def test_dgrad_pairs_takes_empty(shape, other, device):
    tensors = operands(shape, torch.float32, device, other)
    torch.testing.assert_close(dgrad_pairs(*tensors, tile=TILE), dgrad_pairs_ref(*tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_dgrad_pairs_rounds_once(dtype, device):
    """Where the products nearly cancel, whoever rounds one of them has little left."""
    dy, w, *_ = operands((64, 64, 64), dtype, device)
    near = w + 2**-6 * w.roll(1, 0)
    exact = dgrad_pairs_ref(*(tensor.double() for tensor in (dy, near, -dy, w)))
    assert relative_error(dgrad_pairs(dy, near, -dy, w, tile=TILE), exact) < BOUND[dtype]
    rounded = dgrad(dy, near, tile=TILE) - dgrad(dy, w, tile=TILE)  # the check can fail
    assert relative_error(rounded, exact) > 20 * BOUND[dtype]


def test_dgrad_pairs_refuses_shapes_that_do_not_match(device):
    dy, w, dy2, w2 = operands((6, 8, 16), torch.float32, device)
    with pytest.raises(ValueError, match=r"weight of shape \(16, 8\).*got \(15, 8\)"):
        dgrad_pairs(dy, w[1:], dy2, w2)
    with pytest.raises(ValueError, match=r"dy2 of shape \(6, 16\).*got \(5, 16\)"):
        dgrad_pairs(dy, w, dy2[1:], w2)
    with pytest.raises(TypeError, match=r"weight2 in torch\.bfloat16"):
        dgrad_pairs(dy, w, dy2, w2.bfloat16())
