"""RMSNorm and LayerNorm in any layout and of large means; the oracles against autograd; sums over rows."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.checks import DTYPES, LAYOUTS, assert_accurate, normal
from tests.products import pairwise
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.norm import layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.reference import (
    bias_grad_ref,
    layer_norm_bwd_ref,
    layer_norm_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)
from tpkernels.kernels.tiles import BlockTile


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


SUM_TILE = BlockTile(chunk=16, block_rows=8, block_cols=32, num_warps=4)
# more rows than chunk * chunk, so that the partial sums take two levels
ROWS_AND_COLS = {"one_chunk": (16, 32), "ragged": (45, 37), "one_row": (1, 5), "two_levels": (300, 7)}


@pairwise(shape=ROWS_AND_COLS, dtype=DTYPES)
def test_bias_grad_matches_float64(shape, dtype, device):
    dy = normal(*shape, dtype, device) + 1  # else the sums cancel
    db = bias_grad(dy, tile=SUM_TILE)
    assert db.dtype == torch.float32
    assert_accurate(db, bias_grad_ref(dy.double()))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bias_grad_takes_any_layout(layout, device):
    dy = layout(normal(45, 40, torch.bfloat16, device) + 1)
    assert_accurate(bias_grad(dy), bias_grad_ref(dy.double()))


@pytest.mark.parametrize("shape", [(0, 7), (7, 0)], ids=["no_rows", "no_cols"])
def test_bias_grad_takes_empty(shape, device):
    assert torch.equal(bias_grad(torch.empty(shape, device=device)), torch.zeros(shape[1], device=device))
