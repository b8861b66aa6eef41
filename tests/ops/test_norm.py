"""RMSNorm and LayerNorm as ops: numbers, layouts, compile, and what is refused."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.ops.cases import gradients
from tests.ops.test_values import error
from tpkernels import ops
from tpkernels.dispatch import backends, norms

K = 40
OPS = {
    "rms_norm": (lambda x, w: ops.rms_norm(x, w), lambda x, w: F.rms_norm(x, (K,), w, 1e-5), 1),
    "layer_norm": (
        lambda x, w, b: ops.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, (K,), w, b, 1e-5),
        2,
    ),
    "layer_norm_without_bias": (
        lambda x, w: ops.layer_norm(x, w),
        lambda x, w: F.layer_norm(x, (K,), w, None, 1e-5),
        1,
    ),
    "eps": (partial(ops.layer_norm, eps=0.5), lambda x, w, b: F.layer_norm(x, (K,), w, b, 0.5), 2),
}
# y is rounded once, gradients of bf16 rounded operands twice
BOUND = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2, torch.float64: 1e-14}


def operands(name, leading, dtype, device, wide=False):
    x = (torch.randn(*leading, K, device=device) * 2 + 1).to(dtype)
    parameters = [torch.randn(K, device=device) for _ in range(OPS[name][2])]
    return [x, *(parameter.to(torch.float32 if wide else dtype) for parameter in parameters)]


@pytest.mark.parametrize("wide", [False, True], ids=["one_dtype", "fp32_parameters"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_norm_and_gradients_match_float64(name, dtype, wide, backend, device):
    if dtype is torch.float64 and backend == "triton":
        pytest.skip("the kernels take no float64")
    op, plain, _ = OPS[name]
    for leading in ((37,), (), (2, 3), (2, 1, 3, 2), (0,), (2, 0, 3)):
        given = operands(name, leading, dtype, device, wide)
        dy = torch.randn(*leading, K, device=device).to(dtype)
        exact = gradients(plain, [t.double() for t in given], dy.double())
        for ours, truth, like in zip(gradients(op, given, dy), exact, [given[0], *given], strict=True):
            assert ours.dtype == like.dtype
            assert error(ours, truth) < BOUND[ours.dtype if wide and like is not given[0] else dtype]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_torch_sums_over_many_tokens_as_well_as_over_few(name, monkeypatch):
    """Summed one after the other, they would be off by 1.5e-6."""
    monkeypatch.setattr(backends, "backend", "torch")
    op, plain, _ = OPS[name]
    given = operands(name, (8192,), torch.float32, "cpu")
    dy = torch.randn(8192, K)
    exact = gradients(plain, [t.double() for t in given], dy.double())
    for ours, truth in zip(gradients(op, given, dy), exact, strict=True):
        assert error(ours, truth) < 3e-7


def test_torch_keeps_statistics_in_fp32():
    x, *parameters = operands("layer_norm", (5,), torch.bfloat16, "cpu")
    _, mean, rstd = norms.layer_norm.by_torch(x, *parameters, 1e-5)
    assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norm_takes_views(name, backend, device):
    op, plain, _ = OPS[name]
    x, *parameters = operands(name, (6, 4), torch.float32, device)
    parameters = [parameter.repeat_interleave(2)[::2] for parameter in parameters]
    for view in (x.transpose(0, 1), x[:, ::2], x[:1].expand(5, 4, K), x.permute(1, 0, 2)[::2]):
        dy = torch.ones((), device=device).expand(view.shape)
        expected = gradients(plain, [view, *parameters], dy)
        for ours, theirs in zip(gradients(op, [view, *parameters], dy), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_each_combination_of_required_gradients(name, backend, device):
    op = OPS[name][0]
    given = operands(name, (3,), torch.float32, device)
    expected = gradients(op, given, torch.ones(3, K, device=device))[1:]
    for wanted in range(1, 2 ** len(given)):
        leaves = [t.clone().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(given)]
        op(*leaves).sum().backward()
        for i, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
            assert (leaf.grad is not None) == bool(wanted >> i & 1)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norm_compiles_for_any_number_of_tokens(name, dtype, device):
    op = OPS[name][0]
    compiled = torch.compile(lambda *t: op(*t) * 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 8, 37):
        given = operands(name, (2, tokens), dtype, device)
        dy = torch.randn(2, tokens, K, device=device).to(dtype)
        for ours, eager in zip(gradients(compiled, given, dy), gradients(op, given, dy), strict=True):
            assert torch.equal(ours, eager)
    given[0] = torch.randn(K, tokens, device=device).to(dtype).t()
    assert torch.equal(compiled(*given), op(*given))


def test_autocast_leaves_dtypes_alone(backend, device):
    x, weight, bias = operands("layer_norm", (5,), torch.bfloat16, device, wide=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = ops.layer_norm(x, weight, bias)
        assert ops.rms_norm(x.float(), weight).dtype == torch.float32
    assert y.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"rms_norm: expected weight \(8,\) for x \(3, 8\), got \(7,\)"):
        ops.rms_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match=r"layer_norm: expected bias \(8,\)"):
        ops.layer_norm(x, torch.ones(8), torch.ones(1, 8))
    with pytest.raises(TypeError, match=r"expected weight in torch\.float32 like x"):
        ops.rms_norm(x, torch.ones(8, dtype=torch.float16))
    with pytest.raises(TypeError, match="floating-point"):
        ops.rms_norm(x.int(), torch.ones(8))
    with pytest.raises(ValueError, match="one device"):
        ops.rms_norm(x, torch.ones(8, device="meta"))
    with pytest.raises(ValueError, match="without dimensions"):
        ops.rms_norm(torch.tensor(1.0), torch.ones(1))
