"""Each op and its gradients against float64, by torch and by our kernels."""

import pytest
import torch

from tests.ops.cases import CASES, K, N, gradients
from tpkernels import ops

BOUND = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}  # of two roundings in a row
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_op_and_gradients_match_float64(case, dtype, backend, device):
    operands = case.operands((37,), dtype, device)
    assert_right(case, operands, torch.randn(37, N, device=device).to(dtype))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 3, 2), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", ["linear_gelu", "mlp_gelu_tanh", "swiglu", "mlp_swiglu"])
def test_op_takes_any_leading_dimensions(name, leading, backend, device):
    operands = CASES[name].operands(leading, torch.float32, device)
    assert_right(CASES[name], operands, torch.randn(*leading, N, device=device))


@pytest.mark.parametrize("name", ["linear_gelu", "mlp_gelu_tanh", "mlp_swiglu"])
def test_op_takes_views(name, backend, device):
    """Transposed, strided and expanded operands, and an expanded gradient, as `.sum()` sends one."""
    case = CASES[name]
    x, *parameters = case.operands((6, 4), torch.float32, device)
    parameters = [p.T.contiguous().T if p.ndim == 2 else p.repeat(2)[::2].contiguous() for p in parameters]
    for view in (x.transpose(0, 1), x[:, ::2], x[:1].expand(5, 4, K), x.flatten()[: 2 * K].view(2, K)):
        dy = torch.ones((), device=device).expand(*view.shape[:-1], N)
        assert_right(case, [view, *parameters], dy)


@pytest.mark.parametrize("name", ["linear_gelu", "mlp_gelu_tanh", "swiglu", "mlp_swiglu"])
def test_each_combination_of_required_gradients(name, backend, device):
    case = CASES[name]
    operands = case.operands((3,), torch.float32, device)
    expected = gradients(case.plain, operands, torch.ones(3, N, device=device))[1:]
    for wanted in range(2 ** len(operands)):
        leaves = [operand.clone().requires_grad_(bool(wanted >> i & 1)) for i, operand in enumerate(operands)]
        y = case.op(*leaves)
        assert y.requires_grad == (wanted > 0)
        if wanted:
            y.sum().backward()
        for i, (leaf, truth) in enumerate(zip(leaves, expected, strict=True)):
            if wanted >> i & 1:
                torch.testing.assert_close(leaf.grad, truth, rtol=1e-4, atol=1e-5)
            else:
                assert leaf.grad is None


def test_gradients_accumulate_over_backwards(backend, device):
    operands = CASES["mlp_gelu"].operands((4,), torch.float32, device)
    once = gradients(CASES["mlp_gelu"].op, operands, torch.ones(4, N, device=device))[1:]
    leaves = [operand.clone().requires_grad_() for operand in operands]
    for _ in range(3):
        CASES["mlp_gelu"].op(*leaves).sum().backward()
    for leaf, grad in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * grad, rtol=1e-4, atol=1e-5)


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


def test_inputs_are_never_changed(backend, device):
    for case in CASES.values():
        operands = case.operands((5,), torch.float32, device)
        copies = [operand.clone() for operand in operands]
        gradients(case.op, operands, torch.ones(5, N, device=device))
        for operand, copy in zip(operands, copies, strict=True):
            assert torch.equal(operand, copy)


def test_same_inputs_give_the_same_bits(backend, device):
    for name in ("linear_gelu", "mlp_gelu_tanh", "mlp_swiglu"):
        operands = CASES[name].operands((70,), torch.bfloat16, device)
        dy = torch.randn(70, N, device=device)
        first = gradients(CASES[name].op, operands, dy)
        again = gradients(CASES[name].op, operands, dy)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


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
    case = CASES["linear_gelu"]
    operands = case.operands((9,), torch.float32, device)
    dy = torch.randn(9, N, device=device)
    doubled = type(case)(lambda x, w, b: case.op(x, w, 2 * b), case.plain, case.shapes)
    straight = type(case)(
        lambda x, w, b: (
            CASES["linear_None"].op(x, w, b) + (case.op(x, w, b) - CASES["linear_None"].op(x, w, b)).detach()
        ),
        case.plain,
        case.shapes,
    )
    for fault in (doubled, straight):
        with pytest.raises(AssertionError, match="result"):
            assert_right(fault, operands, dy)
