"""Ops as citizens of PyTorch: autocast, compile, opcheck, what is saved, what is refused."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.ops.cases import CASES, FFN, K, N, gradients
from tpkernels import ops
from tpkernels.kernels.activations import ACTIVATIONS

OPS = ["linear_None", "linear_gelu", "mlp_gelu_tanh", "swiglu", "mlp_swiglu"]


def saved_bytes(function, *operands) -> int:
    """What autograd keeps between forward and backward, each storage once, parameters left out."""
    kept: dict[int, int] = {}
    parameters = {operand.untyped_storage().data_ptr() for operand in operands}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(*operands)
    assert y.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("linear_None", 0),
        ("linear_gelu", 37 * N),  # z
        ("swiglu", 2 * 37 * N),  # g, u
        ("mlp_gelu_tanh", 37 * FFN),  # z
        ("mlp_swiglu", 2 * 37 * FFN),  # g, u
    ],
)
def test_only_inputs_and_preactivations_are_saved(name, elements, backend, device):
    operands = [t.requires_grad_() for t in CASES[name].operands((37,), torch.float32, device)]
    assert saved_bytes(CASES[name].op, *operands) == 4 * elements


@pytest.mark.parametrize("name", OPS)
def test_compiled_op_saves_what_the_eager_one_does(name, device):
    """And no more: h of an MLP is computed again in both."""
    operands = [t.requires_grad_() for t in CASES[name].operands((37,), torch.float32, device)]
    compiled = torch.compile(CASES[name].op, fullgraph=True, backend="aot_eager")
    assert saved_bytes(compiled, *operands) == saved_bytes(CASES[name].op, *operands)


def test_linear_saves_nothing_for_frozen_parameters(backend, device):
    """A frozen weight still has to be kept for dx, but x need not be."""
    x = torch.randn(37, K, device=device, requires_grad=True)
    weight = torch.randn(N, K, device=device)
    y = ops.linear(x * 1, weight)
    assert [t is not None for t in y.grad_fn.saved_tensors] == [False, True, False]


def test_nothing_is_kept_without_gradients(backend, device):
    for name in OPS:
        operands = [t.requires_grad_() for t in CASES[name].operands((5,), torch.float32, device)]
        with torch.no_grad():
            assert CASES[name].op(*operands).grad_fn is None


@pytest.mark.parametrize("name", OPS)
def test_op_compiles_without_graph_breaks_for_any_number_of_tokens(name, backend, device):
    case = CASES[name]
    compiled = torch.compile(
        lambda *operands: case.op(*operands) * 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (3, 8, 37):
        operands = case.operands((2, tokens), torch.float32, device)
        dy = torch.randn(2, tokens, N, device=device)
        for ours, eager in zip(
            gradients(compiled, operands, dy), gradients(case.op, operands, dy), strict=True
        ):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*operands), case.op(*operands), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPS)
def test_autocast_casts_as_torch_does(name, backend, device):
    case = CASES[name]
    operands = case.operands((2, 5), torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours = gradients(case.op, operands, torch.ones(2, 5, N, device=device))
        plain = gradients(case.plain, operands, torch.ones(2, 5, N, device=device))
    for actual, expected in zip(ours, plain, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", OPS)
def test_op_compiles_under_autocast(name, device):
    case = CASES[name]
    compiled = torch.compile(case.op, fullgraph=True, dynamic=True, backend="aot_eager")
    operands = case.operands((2, 5), torch.float32, device)
    dy = torch.randn(2, 5, N, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours, eager = gradients(compiled, operands, dy), gradients(case.op, operands, dy)
    assert ours[0].dtype == torch.bfloat16
    for actual, expected in zip(ours, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_float64_is_left_alone_by_autocast(device):
    operands = CASES["linear_gelu"].operands((3,), torch.float64, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert CASES["linear_gelu"].op(*operands).dtype == torch.float64


@pytest.mark.parametrize("name", ["linear_None", "linear_gelu"])
def test_linear_without_gradients_is_the_same_to_the_bit(name, backend, device):
    operands = CASES[name].operands((5,), torch.float32, device)
    with torch.no_grad():
        plain = CASES[name].op(*operands)
    recorded = CASES[name].op(*(operand.requires_grad_() for operand in operands))
    assert (plain.grad_fn, recorded.grad_fn is None) == (None, False)
    assert torch.equal(plain, recorded)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_forward_mode_is_a_clear_error(name, grad, backend, device):
    """Kernels would drop the tangent."""
    x, *others = CASES[name].operands((5,), torch.float32, device)
    error = pytest.raises(NotImplementedError, match="jvp")
    with torch.set_grad_enabled(grad), forward_ad.dual_level(), error:
        CASES[name].op(forward_ad.make_dual(x, torch.ones_like(x)), *others)
    assert CASES[name].op(x, *others).shape[0] == 5


def test_meta_tensors_give_shapes():
    for name in OPS:
        operands = CASES[name].operands((2, 3), torch.float32, torch.device("cpu"))
        y = CASES[name].op(*(operand.to("meta") for operand in operands))
        assert y.shape == (2, 3, N)
        assert y.device.type == "meta"


X, W, B = torch.ones(3, K), torch.ones(N, K), torch.ones(N)
GOOD = (torch.ones(FFN, K), torch.ones(FFN), torch.ones(N, FFN), torch.ones(N))
BAD = {
    "features": (ValueError, lambda: ops.linear(X, W[:, 1:]), r"got \(3, 24\) and \(16, 23\)"),
    "no_dimensions": (ValueError, lambda: ops.linear(torch.ones(()), W), "without dimensions"),
    "weight_vector": (ValueError, lambda: ops.linear(X, B), r"expected x \(..., in_features\) and weight"),
    "bias": (ValueError, lambda: ops.linear(X, W, B[1:]), r"expected bias \(16,\).* got \(15,\)"),
    "dtypes": (TypeError, lambda: ops.linear(X, W.half()), "x in torch.float32 and weight in torch.float16"),
    "bias_dtype": (TypeError, lambda: ops.linear(X, W, B.half()), "bias in torch.float16"),
    "devices": (ValueError, lambda: ops.linear(X, W.to("meta")), "x on cpu and weight on meta"),
    "integers": (
        TypeError,
        lambda: ops.linear(X.long(), W.long()),
        "floating-point tensors, got torch.int64",
    ),
    "activation": (ValueError, lambda: ops.linear(X, W, B, "selu"), f"{', '.join(ACTIVATIONS)}; got 'selu'"),
    "gate_shapes": (ValueError, lambda: ops.swiglu(X, W, W[1:]), "w_gate and w_up of one shape"),
    "gate_kind": (ValueError, lambda: ops.swiglu(X, W, W, kind="reglu"), "swiglu, geglu"),
    "down": (
        ValueError,
        lambda: ops.mlp(X, *GOOD[:2], GOOD[2][:, 1:], GOOD[3]),
        r"w_down \(out_features, 40\)",
    ),
    "gated_bias": (ValueError, lambda: ops.mlp(X, *GOOD, w_gate=GOOD[0]), "expected no b_up with w_gate"),
    "gated_activation": (
        ValueError,
        lambda: ops.mlp(X, GOOD[0], None, *GOOD[2:], w_gate=GOOD[0], activation="relu"),
        "expected a gated unit",
    ),
}


@pytest.mark.parametrize(("error", "call", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_in_words(error, call, words, backend):
    with pytest.raises(error, match=words):
        call()
