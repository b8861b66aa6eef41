"""Ops as citizens of PyTorch: autocast, compile, opcheck, what is saved, what is refused."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

from tests.ops.cases import CASES, FFN, K, N, gradients
from tpkernels import ops
from tpkernels.dispatch import steps
from tpkernels.kernels.activations import ACTIVATIONS
from tpkernels.ops import registered
from tpkernels.ops.gated_mlp import registered_gated_mlp
from tpkernels.ops.mlp import registered_mlp

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


def matrices(*shapes):
    return [torch.randn(shape).requires_grad_() for shape in shapes]


OPCHECKS = {
    "linear": (registered.linear, (*matrices((5, K), (N, K), (N,)), "gelu", True)),
    "linear_plain": (registered.linear, (*matrices((5, K), (N, K)), None, "none", False)),
    "glu": (registered.glu, (*matrices((5, K), (N, K), (N, K)), "swiglu", True)),
    "dgrad": (registered.dgrad, tuple(t.detach() for t in matrices((5, N), (N, K)))),
    "dgrad_act": (
        registered.dgrad_act,
        (*(t.detach() for t in matrices((5, N), (N, K), (5, K))), "gelu", True),
    ),
    "dglu": (
        registered.dglu,
        (*(t.detach() for t in matrices((5, N), (N, K), (5, K), (5, K))), "swiglu"),
    ),
    "wgrad": (registered.wgrad, tuple(t.detach() for t in matrices((5, N), (5, K)))),
    "bias_grad": (registered.bias_grad, tuple(t.detach() for t in matrices((5, N)))),
    "mlp": (registered_mlp, (*matrices((5, K), (FFN, K), (FFN,), (N, FFN), (N,)), "gelu", True)),
    "gated_mlp": (
        registered_gated_mlp,
        (*matrices((5, K), (FFN, K), (FFN, K), (N, FFN), (N,)), "swiglu", True),
    ),
}


@pytest.mark.parametrize(("op", "arguments"), OPCHECKS.values(), ids=OPCHECKS.keys())
def test_registered_operator_passes_opcheck(op, arguments, backend, device):
    opcheck(op, tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments))


@pytest.mark.parametrize("name", ["dgrad_act", "bias_grad"])
def test_sums_of_float64_are_announced_as_float64(name):
    op, arguments = OPCHECKS[name]
    doubles = tuple(a.double() if isinstance(a, torch.Tensor) else a for a in arguments)
    opcheck(op, doubles, test_utils="test_faketensor")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["linear", "glu", "mlp", "gated_mlp"])
def test_registered_operator_called_directly_casts_as_the_region_asks(name, dtype, device):
    op, arguments = OPCHECKS[name]
    arguments = [
        a.detach().to(device).requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments
    ]
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    with torch.autocast(device.type, dtype=dtype):
        y = getattr(torch.ops.tpkernels, name)(*arguments)[0]
    expected = op(*(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in arguments))[0]
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    grads = (torch.autograd.grad(result.float().sum(), tensors) for result in (y, expected))
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == torch.float32  # that of the parameter
        assert torch.equal(ours, theirs)


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


def test_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setattr(steps, "backend", "cuda")
    with pytest.raises(ValueError, match="TPKERNELS_BACKEND is 'cuda'; expected one of auto, torch, triton"):
        ops.linear(X, W)


def test_automatic_backend_on_the_cpu_is_torch(monkeypatch):
    from tpkernels.dispatch import torch_steps

    monkeypatch.setattr(steps, "backend", "auto")
    assert steps.steps_on(torch.device("cpu")) is torch_steps
