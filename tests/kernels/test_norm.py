"""RMSNorm and LayerNorm in any layout and of large means; the oracles against torch's autograd."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.checks import LAYOUTS, assert_accurate, normal
from tpkernels.kernels.norm import layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.reference import layer_norm_bwd_ref, layer_norm_ref, rms_norm_bwd_ref, rms_norm_ref


def operands(shape, dtype, device):
    tokens, features = shape
    x, dy = (normal(tokens, features, dtype, device) for _ in range(2))
    weight, bias = (1 + normal(2, features, dtype, device) / 8).unbind()
    return x + 0.5, dy, weight, bias


def doubles(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


def test_layer_norm_takes_no_bias_and_fp32_parameters(device):
    x, _, weight, _ = operands((20, 48), torch.bfloat16, device)
    y = layer_norm_fwd(x, weight.float()).y
    assert y.dtype == torch.bfloat16
    assert_accurate(y, layer_norm_ref(*doubles(x, weight))[0])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_norms_take_any_layout(layout, device):
    x, dy, weight, _ = operands((20, 48), torch.float16, device)
    x, dy = layout(x), layout(dy)
    weight = layout(weight.expand(2, -1).contiguous())[1]
    out = rms_norm_fwd(x, weight)
    assert_accurate(out.y, rms_norm_ref(*doubles(x, weight))[0])
    back = rms_norm_bwd(dy, x, weight, out.rstd)
    exact_dx, exact_dw = rms_norm_bwd_ref(*doubles(dy, x, weight, out.rstd))
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


def test_norm_rows_do_not_depend_on_the_batch(device):
    x, _, weight, bias = operands((70, 45), torch.bfloat16, device)
    whole = layer_norm_fwd(x, weight, bias).y
    for tokens in (1, 17, 69):
        assert torch.equal(layer_norm_fwd(x[:tokens], weight, bias).y, whole[:tokens])


def test_norm_oracles_match_autograd(device):
    x, dy, weight, bias = (t.double().requires_grad_() for t in operands((9, 20), torch.float32, device))
    y = functional.rms_norm(x, (20,), weight, 1e-5)
    exact = torch.autograd.grad(y, (x, weight), dy)
    ours, rstd = rms_norm_ref(x, weight)
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(rms_norm_bwd_ref(dy, x, weight, rstd), exact)

    y = functional.layer_norm(x, (20,), weight, bias, 1e-5)
    exact = torch.autograd.grad(y, (x, weight, bias), dy)
    ours, mean, rstd = layer_norm_ref(x, weight, bias)
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(layer_norm_bwd_ref(dy, x, weight, mean, rstd), exact)
