"""Each op and its gradients against float64, by torch and by our kernels."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.ops.cases import CASES, EACH_KIND, NORMS, SOME, K, N, gradients
from tests.products import pairwise
from tpkernels import ops
from tpkernels.dispatch import backends, norms
from tpkernels.dispatch.primitives import RECORDS

# of two roundings in a row
BOUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = ["torch", "triton"]
TOKENS = {"torch": 37, "triton": 21}  # the interpreter is slow; a tile that is not full in both


def error(actual, exact) -> float:
    assert actual.shape == exact.shape
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def assert_right(case, operands, dy) -> None:
    """Within a bound, and at most twice as far off as plain torch in the same dtype."""
    exact = gradients(case.plain, [operand.double() for operand in operands], dy.double())
    torchs = gradients(case.plain, operands, dy)
    actual = gradients(case.op, operands, dy)
    for i, (ours, plain, truth) in enumerate(zip(actual, torchs, exact, strict=True)):
        assert ours.dtype == plain.dtype
        assert error(ours, truth) < BOUND[ours.dtype], f"result {i}"
        assert error(ours, truth) <= 2 * error(plain, truth) + 1e-7, f"result {i}"


@pairwise(case=CASES, dtype=DTYPES, by=BACKENDS)
def test_op_and_gradients_match_float64(case, dtype, backend, device):
    tokens = TOKENS[backend]
    operands = case.operands((tokens,), dtype, device)
    assert_right(case, operands, torch.randn(tokens, N, device=device).to(dtype))


@pairwise(
    case=NORMS,
    dtype_by={f"{name}-{by}": (dtype, by) for name, dtype in DTYPES.items() for by in BACKENDS}
    | {"fp64-torch": (torch.float64, "torch")},  # the kernels take none
    parameters=["of_its_dtype", "fp32"],
)
def test_norm_and_gradients_match_float64(case, dtype_by, parameters, device, monkeypatch):
    dtype, backend = dtype_by
    monkeypatch.setattr(backends, "backend", backend)
    for tokens in (TOKENS[backend], 1):
        x, *given = case.operands((tokens,), torch.float32, device)
        x = (x * 2 + 1).to(dtype)
        given = [x, *(t if parameters == "fp32" else t.to(dtype) for t in given)]
        dy = torch.randn(tokens, K, device=device).to(dtype)
        exact = gradients(case.plain, [t.double() for t in given], dy.double())
        for ours, truth, like in zip(gradients(case.op, given, dy), exact, [x, *given], strict=True):
            assert ours.dtype == like.dtype
            assert error(ours, truth) < BOUND[ours.dtype]


@pytest.mark.parametrize("features", [K, norms.MANY_FEATURES])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_torch_sums_over_many_tokens_as_well_as_over_few(name, features, monkeypatch):
    """Summed one after the other, they would be off by 1.5e-6."""
    monkeypatch.setattr(backends, "backend", "torch")
    given = [torch.randn(8192, features), *(torch.randn(features) for _ in NORMS[name].shapes)]
    dy = torch.randn(8192, features)
    exact = gradients(NORMS[name].plain, [t.double() for t in given], dy.double())
    for ours, truth in zip(gradients(NORMS[name].op, given, dy), exact, strict=True):
        assert error(ours, truth) < 3e-7


def test_torch_keeps_statistics_of_norms_in_fp32():
    by_torch = RECORDS["layer_norm"].by_torch
    _, mean, rstd = by_torch(*NORMS["layer_norm"].operands((5,), torch.bfloat16), 1e-5)
    assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("case", EACH_KIND)
def test_views_and_leading_dimensions(case, backend, device):
    """Transposed, strided and expanded operands, and an expanded gradient, as `.sum()` sends one."""
    x, *parameters = case.operands((6, 4), device=device)
    strided = [p.T.contiguous().T if p.ndim == 2 else p.repeat_interleave(2)[::2] for p in parameters]
    views = [x.transpose(0, 1), x[:, ::2], x[:1].expand(5, 4, K), x.flatten()[: 2 * K].view(2, K)]
    views += [x[0, 0], x[0], x.view(2, 3, 1, 4, K), x[:0], x[:2, :0], x.permute(1, 0, 2)[2]]
    in_fp8 = "quantize" in getattr(case.op, "keywords", {})
    for view in views[:: 1 if backend == "torch" else 5]:
        dy = torch.ones((), device=device).expand(*view.shape[:-1], case.out)
        rows = [view.reshape(-1, K).contiguous(), *parameters]
        expected = gradients(case.op if in_fp8 else case.plain, rows, dy.reshape(-1, case.out).contiguous())
        found = gradients(case.op, [view, *strided], dy)
        assert found[0].shape == dy.shape
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.view(theirs.shape), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("features", "out"), [(0, 4), (4, 0)], ids=["no_features", "no_outputs"])
def test_linear_without_features_or_outputs(features, out, backend, device):
    x = torch.randn(3, features, device=device, requires_grad=True)
    weight = torch.randn(out, features, device=device, requires_grad=True)
    bias = torch.randn(out, device=device)
    y = ops.linear(x, weight, bias)
    torch.testing.assert_close(y, bias.expand(3, out))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    assert not x.grad.any()


def test_inputs_are_never_changed_and_give_the_same_bits_again(backend, device):
    for name, case in (CASES | NORMS).items():
        tokens = 70 if name in SOME else 5
        operands = case.operands((tokens,), torch.bfloat16, device)
        copies = [operand.clone() for operand in operands]
        dy = torch.randn(tokens, case.out, device=device)
        first, again = (gradients(case.op, given, dy) for given in (operands, copies))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(operands, copies, strict=True))


@pytest.mark.parametrize("name", ["swiglu", "mlp_swiglu", "mlp_gelu_tanh"])
def test_backward_alone_may_run_in_an_autocast_region(name, device):
    """What was saved outside is wider than what is computed there."""
    case = CASES[name]
    operands = case.operands((9,), torch.float32, device)
    exact = gradients(case.plain, operands, torch.ones(9, N, device=device))[1:]
    leaves = [operand.clone().requires_grad_() for operand in operands]
    y = case.op(*leaves)
    with torch.autocast(device.type, torch.bfloat16):
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for ours, truth in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, truth.double()) < BOUND[torch.bfloat16]


def test_checker_sees_planted_faults(device):
    """A bias added twice, and a gradient that forgets the activation."""
    case, straight = CASES["linear_gelu"], CASES["linear_None"].op
    operands = case.operands((9,), torch.float32, device)
    dy = torch.randn(9, N, device=device)

    def forgetful(*operands):
        return straight(*operands) + (case.op(*operands) - straight(*operands)).detach()

    for fault in (lambda x, w, b: case.op(x, w, 2 * b), forgetful):
        with pytest.raises(AssertionError, match="result"):
            assert_right(replace(case, op=fault), operands, dy)


@pairwise(kind=["swiglu", "geglu", "geglu_tanh"], dtype=DTYPES, by=BACKENDS)
def test_a_gate_of_given_tensors_and_its_gradients(kind, dtype, backend):
    """Rounded once by a kernel; by torch after each step."""
    gate = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": partial(F.gelu, approximate="tanh")}[kind]
    given = [torch.randn(5, 7, 33).to(dtype) for _ in range(3)]
    *operands, dh = given
    ours = gradients(partial(ops.gated, kind=kind), operands, dh)
    exact = gradients(lambda g, u: gate(g) * u, [t.double() for t in operands], dh.double())
    for found, right in zip(ours, exact, strict=True):
        assert found.dtype is dtype
        assert error(found, right) < BOUND[dtype]


def test_a_gate_refuses_tensors_that_are_not_alike():
    g = torch.randn(4, 6)
    for u in (g[:1], g.double(), g.to("meta")):
        with pytest.raises(
            ValueError, match=r"gated: expected .* of one shape, dtype and device, got \(4, 6\)"
        ):
            ops.gated(g, u)
    with pytest.raises(ValueError, match="got 'relu'"):
        ops.gated(g, g, kind="relu")
    u = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ops.gated, (torch.randn_like(u).requires_grad_(), u))
