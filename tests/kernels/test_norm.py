"""RMSNorm and LayerNorm, forward and backward, against float64; the oracles against torch's autograd."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.checks import DTYPES, LAYOUTS, assert_accurate, normal
from tests.products import pairwise
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.reference import layer_norm_bwd_ref, layer_norm_ref, rms_norm_bwd_ref, rms_norm_ref

# (tokens, features); 70 tokens are more than two of the chunks that a backward program takes
SHAPES = {
    "one_block": (16, 64),
    "ragged": (70, 45),
    "one_row": (1, 40),
    "one_feature": (5, 1),
    "wide": (3, 2100),
}


def operands(shape, dtype, device):
    tokens, features = shape
    x, residual, dy, dsummed = (normal(tokens, features, dtype, device) for _ in range(4))
    weight, bias = (1 + normal(2, features, dtype, device) / 8).unbind()
    return x + 0.5, residual, dy, dsummed, weight, bias


def doubles(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


@pairwise(shape=SHAPES, with_residual=[False, True], dtype=DTYPES)
def test_rms_norm_matches_float64(shape, with_residual, dtype, device):
    x, residual, dy, dsummed, weight, _ = operands(shape, dtype, device)
    residual, dsummed = (residual, dsummed) if with_residual else (None, None)
    y, summed, mean, rstd = rms_norm_fwd(x, weight, residual=residual)
    assert mean is None
    assert residual is None or torch.equal(summed, x + residual)
    # from here on the rounded sum is the input: y and the gradients are those of what is kept
    exact_y, _, exact_rstd = rms_norm_ref(*doubles(summed, weight))
    dx, dweight, dbias = rms_norm_bwd(dy, summed, weight, rstd, dsummed=dsummed)
    exact_dx, exact_dw = rms_norm_bwd_ref(*doubles(dy, summed, weight), exact_rstd, *doubles(dsummed))
    assert dbias is None
    assert dweight.dtype == torch.float32
    assert_all_accurate(y=(y, exact_y), rstd=(rstd, exact_rstd), dweight=(dweight, exact_dw))
    if shape[1] > 1 or with_residual:  # of one feature the gradient is all cancellation
        assert_accurate(dx, exact_dx, what="dx")


def assert_all_accurate(**results):
    for what, (actual, exact) in results.items():
        assert_accurate(actual, exact, what=what)


@pairwise(
    shape={name: shape for name, shape in SHAPES.items() if name != "one_feature"},
    with_residual=[False, True],
    dtype=DTYPES,
)
def test_layer_norm_matches_float64(shape, with_residual, dtype, device):
    x, residual, dy, dsummed, weight, bias = operands(shape, dtype, device)
    residual, dsummed = (residual, dsummed) if with_residual else (None, None)
    y, summed, mean, rstd = layer_norm_fwd(x, weight, bias, residual=residual)
    exact_y, _, exact_mean, exact_rstd = layer_norm_ref(*doubles(summed, weight, bias))
    assert_all_accurate(y=(y, exact_y), mean=(mean, exact_mean), rstd=(rstd, exact_rstd))
    ours = layer_norm_bwd(dy, summed, weight, mean, rstd, dsummed=dsummed)
    exact = layer_norm_bwd_ref(*doubles(dy, summed, weight), exact_mean, exact_rstd, *doubles(dsummed))
    assert_all_accurate(**dict(zip(("dx", "dweight", "dbias"), zip(ours, exact, strict=True), strict=True)))


def test_layer_norm_takes_no_bias_and_fp32_parameters(device):
    x, _, _, _, weight, _ = operands((20, 48), torch.bfloat16, device)
    y = layer_norm_fwd(x, weight.float()).y
    assert y.dtype == torch.bfloat16
    assert_accurate(y, layer_norm_ref(*doubles(x, weight))[0])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_norms_take_any_layout(layout, device):
    x, residual, dy, dsummed, weight, _ = operands((20, 48), torch.float16, device)
    x, residual, dy, dsummed = (layout(t) for t in (x, residual, dy, dsummed))
    weight = layout(weight.expand(2, -1).contiguous())[1]
    out = rms_norm_fwd(x, weight, residual=residual)
    assert_accurate(out.y, rms_norm_ref(*doubles(out.summed, weight))[0])
    back = rms_norm_bwd(dy, out.summed, weight, out.rstd, dsummed=dsummed)
    exact_dx, exact_dw = rms_norm_bwd_ref(*doubles(dy, out.summed, weight, out.rstd, dsummed))
    assert_accurate(back.dx, exact_dx)
    assert_accurate(back.dweight, exact_dw)


def test_norms_take_no_tokens(device):
    x, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    out = rms_norm_fwd(x, weight)
    assert out.y.shape == (0, 8)
    back = rms_norm_bwd(x, x, weight, out.rstd)
    assert back.dx.shape == (0, 8)
    assert torch.equal(back.dweight, torch.zeros(8, device=device))


def test_layer_norm_variance_survives_a_large_mean(device):
    """E[x²] - mean² in fp32 would lose every digit here."""
    x = normal(8, 64, torch.float32, device) + 3000
    y = layer_norm_fwd(x, torch.ones(64, device=device)).y
    exact = layer_norm_ref(x.double(), torch.ones(64, dtype=torch.float64, device=device))[0]
    assert (y - exact).norm() / exact.norm() < 1e-3


def test_norm_gradients_are_the_same_bits_every_time(device):
    x, _, dy, _, weight, _ = operands((100, 48), torch.bfloat16, device)
    rstd = rms_norm_fwd(x, weight).rstd
    first, second = (rms_norm_bwd(dy, x, weight, rstd) for _ in range(2))
    assert torch.equal(first.dweight, second.dweight)
    assert torch.equal(first.dx, second.dx)


def test_norm_rows_do_not_depend_on_the_batch(device):
    x, _, _, _, weight, bias = operands((70, 45), torch.bfloat16, device)
    whole = layer_norm_fwd(x, weight, bias).y
    for tokens in (1, 17, 69):
        assert torch.equal(layer_norm_fwd(x[:tokens], weight, bias).y, whole[:tokens])


def test_norm_oracles_match_autograd(device):
    x, residual, dy, dsummed, weight, bias = (
        t.double().requires_grad_() for t in operands((9, 20), torch.float32, device)
    )
    s = x + residual
    y = functional.rms_norm(s, (20,), weight, 1e-5)
    exact = torch.autograd.grad((y, s), (x, weight), (dy, dsummed), retain_graph=True)
    ours, summed, rstd = rms_norm_ref(x, weight, 1e-5, residual)
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(rms_norm_bwd_ref(dy, summed, weight, rstd, dsummed), exact)

    y = functional.layer_norm(s, (20,), weight, bias, 1e-5)
    exact = torch.autograd.grad((y, s), (x, weight, bias), (dy, dsummed))
    ours, summed, mean, rstd = layer_norm_ref(x, weight, bias, 1e-5, residual)
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(layer_norm_bwd_ref(dy, summed, weight, mean, rstd, dsummed), exact)
