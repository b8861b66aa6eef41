"""Ops as citizens of PyTorch, in fp8 too: autocast, compile, what is saved, what is refused."""

from itertools import product

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian
from torch.utils.checkpoint import checkpoint

from tests.ops.cases import CASES, EACH_KIND, FFN, NORMS, RECIPES, SOME, K, N, gradients
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import Recipe, ops
from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import ACTIVATIONS

BACKENDS = ["torch", "triton"]
NAMED = {param.id: param.values[0] for param in EACH_KIND if not param.marks}
IN_FP8 = [param for param in EACH_KIND if "quantize" in getattr(param.values[0].op, "keywords", {})]


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


def same(a, b) -> list[bool]:
    return [x.equal(y) for x, y in zip(a, b, strict=True)]


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


@pytest.mark.parametrize("name", SOME)
def test_no_more_is_saved_in_fp8(name):
    """Whatever is frozen; x and parameters are not counted, but for x that is computed."""
    for dtype, frozen in product((torch.bfloat16, torch.float32), (False, True)):
        given, bytes_ = CASES[name].operands((12,), dtype), []
        for case in (CASES[name].in_fp8(RECIPES[0]), CASES[name]):
            x, *parameters = (t.clone() for t in given)
            parameters = [parameter.requires_grad_(not frozen) for parameter in parameters]
            bytes_.append(
                saved_bytes(lambda x, *p, op=case.op: op(x * 1, *p), x.requires_grad_(), *parameters)
            )
        assert bytes_[0] <= bytes_[1]
        if frozen and name == "linear_None":
            assert bytes_[0] == bytes_[1]


def test_linear_saves_nothing_for_frozen_parameters(backend, device):
    """A frozen weight still has to be kept for dx, but x need not be."""
    x = torch.randn(37, K, device=device, requires_grad=True)
    weight = torch.randn(N, K, device=device)
    assert saved_bytes(lambda x: ops.linear(x * 1, weight), x) == weight.nbytes


@once(case=NAMED, by=BACKENDS)
def test_without_gradients_nothing_is_kept_and_bits_are_the_same(case, backend, device):
    operands = case.operands((5,), torch.float32, device)
    with torch.no_grad():
        plain = case.op(*(operand.requires_grad_() for operand in operands))
    recorded = case.op(*operands)
    assert (plain.grad_fn, recorded.grad_fn is None) == (None, False)
    assert torch.equal(plain, recorded)


@once(case=NAMED, by=BACKENDS)
def test_each_combination_of_required_gradients(case, backend, device):
    """What is not asked for is left alone, and the rest has the bits that it has with all."""
    operands = case.operands((3,), torch.float32, device)
    dy = torch.ones(3, case.out, device=device)
    expected = gradients(case.op, operands, dy)[1:]
    for wanted in product([False, True], repeat=len(operands)):
        # the interpreter is slow: each alone, and all but each
        if any(wanted) and (backend == "torch" or sum(wanted) in (1, len(operands) - 1)):
            leaves = [t.clone().requires_grad_(want) for t, want in zip(operands, wanted, strict=True)]
            case.op(*leaves).backward(dy)
            for leaf, want, gradient in zip(leaves, wanted, expected, strict=True):
                assert (leaf.grad is not None) == want
                if want:
                    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", IN_FP8)
def test_autocast_of_fp8_gives_what_casts_by_hand_give(case):
    """Products are not narrowed by it: results and gradients have the bits of bfloat16 inputs."""
    given, dy = case.operands((12,)), torch.ones(12, N)
    expected = gradients(case.op, [t.bfloat16() for t in given], dy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(case.op, given, dy)
        within = gradients(case.op, [t.bfloat16() for t in given], dy)
    assert same(within, expected) == [True] * len(expected)
    assert same([t.bfloat16() for t in found], expected) == [True] * len(expected)
    assert [t.dtype for t in found] == [torch.bfloat16, *[torch.float32] * len(given)]


@pytest.mark.parametrize("name", SOME)
def test_autocast_casts_as_torch_does(name, backend, device):
    case = CASES[name]
    operands = case.operands((2, 5), torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours = gradients(case.op, operands, torch.ones(2, 5, N, device=device))
        plain = gradients(case.plain, operands, torch.ones(2, 5, N, device=device))
    for actual, expected in zip(ours, plain, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


def test_autocast_leaves_float64_and_norms_alone(backend, device):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        if backend == "torch":  # the kernels take no float64
            assert ops.linear(*(torch.ones(3, 3, dtype=torch.float64),) * 2).dtype == torch.float64
        assert ops.rms_norm(*NORMS["rms_norm"].operands((3,), torch.float32, device)).dtype == torch.float32
        x, *wide = NORMS["layer_norm"].operands((5,), torch.float32, device)
        assert ops.layer_norm(x.bfloat16(), *wide).dtype == torch.bfloat16


@once(case=NAMED, by=BACKENDS)
def test_compiled_op_computes_and_saves_what_the_eager_one_does(case, backend, device):
    """Without graph breaks, for any number of tokens; h of an MLP is computed again in both."""
    compiled = torch.compile(case.op, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 8):
        operands = case.operands((2, tokens), torch.float32, device)
        dy = torch.randn(2, tokens, case.out, device=device)
        found = gradients(compiled, operands, dy)
        assert same(found, gradients(case.op, operands, dy)) == [True] * len(found)
    x = torch.randn(2, K, tokens, device=device).transpose(1, 2)
    assert torch.equal(compiled(x, *operands[1:]), case.op(x, *operands[1:]))
    leaves = [t.requires_grad_() for t in operands]
    assert saved_bytes(compiled, *leaves) == saved_bytes(case.op, *leaves)


@pytest.mark.parametrize("name", ["linear_gelu", "swiglu", "mlp_swiglu"])
def test_op_compiles_under_autocast(name, device):
    case = CASES[name]
    compiled = torch.compile(case.op, fullgraph=True, dynamic=True, backend="aot_eager")
    operands = case.operands((2, 5), torch.float32, device)
    dy = torch.randn(2, 5, N, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours, eager = gradients(compiled, operands, dy), gradients(case.op, operands, dy)
    assert ours[0].dtype == torch.bfloat16
    assert same(ours, eager) == [True] * len(ours)


def test_norm_of_float64_compiles(device):
    case = NORMS["layer_norm"]
    operands, dy = case.operands((3,), torch.float64, device), torch.randn(3, K, device=device).double()
    compiled = torch.compile(case.op, fullgraph=True, backend="aot_eager")
    assert all(same(gradients(compiled, operands, dy), gradients(case.op, operands, dy)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", IN_FP8)
def test_checkpointing_around_it(case, reentrant):
    given, found = case.operands((12,)), []
    for function in (case.op, lambda *t: checkpoint(case.op, *t, use_reentrant=reentrant)):
        leaves = [t.clone().requires_grad_() for t in given]
        y = function(*leaves)
        y.sum().backward()
        found.append([y.detach(), *(t.grad for t in leaves)])
    assert all(same(*found))


@pytest.mark.parametrize("case", EACH_KIND)
def test_a_weight_changed_before_backward_is_torchs_error(case):
    leaves = [t.requires_grad_() for t in case.operands((12,))]
    y = case.op(*leaves)
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@once(case=NAMED, by=BACKENDS)
def test_forward_mode_is_a_clear_error(case, backend, device):
    """Kernels would drop the tangent."""
    x, *others = case.operands((5,), torch.float32, device)
    for grad in (True, False):
        error = pytest.raises(NotImplementedError, match="jvp")
        with torch.set_grad_enabled(grad), forward_ad.dual_level(), error:
            case.op(forward_ad.make_dual(x, torch.ones_like(x)), *others)
    assert case.op(x, *others).shape[0] == 5


@pytest.mark.parametrize("case", IN_FP8)
def test_second_derivatives_in_fp8_are_refused(case):
    words = "expected to be differentiated once, got a second derivative"
    given = case.operands((12,))
    with pytest.raises(RuntimeError, match=words):
        hessian(lambda *t: case.op(*t).square().sum(), tuple(given))
    leaves = [t.requires_grad_() for t in given]
    first = torch.autograd.grad(case.op(*leaves).square().sum(), leaves, create_graph=True)
    for leaf in leaves:
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(
                sum(g.square().sum() for g in first), leaf, retain_graph=True, allow_unused=True
            )
    x, *parameters = (t.detach() for t in given)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: case.op(x, *parameters).sum())(x)


def test_meta_tensors_give_shapes():
    for name in SOME:
        operands = CASES[name].operands((2, 3), torch.float32, torch.device("cpu"))
        y = CASES[name].op(*(operand.to("meta") for operand in operands))
        assert y.shape == (2, 3, N)
        assert y.device.type == "meta"


X, W, B = torch.ones(3, K), torch.ones(N, K), torch.ones(N)
GOOD = (torch.ones(FFN, K), torch.ones(FFN), torch.ones(N, FFN), torch.ones(N))
ONES = torch.ones(K)
BAD = {
    "features": (ValueError, lambda: ops.linear(X, W[:, 1:]), r"got \(3, 24\) and \(16, 23\)"),
    "no_dimensions": (ValueError, lambda: ops.linear(torch.ones(()), W), "without dimensions"),
    "weight_vector": (ValueError, lambda: ops.linear(X, B), r"expected x \(..., in_features\) and weight"),
    "bias": (ValueError, lambda: ops.linear(X, W, B[1:]), r"expected bias \(16,\).* got \(15,\)"),
    "dtypes": (TypeError, lambda: ops.linear(X, W.half()), "x in torch.float32 and weight in torch.float16"),
    "bias_dtype": (TypeError, lambda: ops.linear(X, W, B.half()), "bias in torch.float16"),
    "devices": (ValueError, lambda: ops.linear(X, W.to("meta")), "x on cpu and weight on meta"),
    "integers": (TypeError, lambda: ops.linear(X.long(), W.long()), "floating-point .*, got torch.int64"),
    "activation": (ValueError, lambda: ops.linear(X, W, B, "selu"), f"{', '.join(ACTIVATIONS)}; got 'selu'"),
    "gate_shapes": (ValueError, lambda: ops.swiglu(X, W, W[1:]), "w_gate and w_up of one shape"),
    "gate_kind": (ValueError, lambda: ops.swiglu(X, W, W, kind="reglu"), "swiglu, geglu"),
    "down": (ValueError, lambda: ops.mlp(X, *GOOD[:2], GOOD[2][:, 1:], GOOD[3]), r"w_down \(out_.*, 40\)"),
    "gated_bias": (ValueError, lambda: ops.mlp(X, *GOOD, w_gate=GOOD[0]), "expected no b_up with w_gate"),
    "gated_activation": (
        ValueError,
        lambda: ops.mlp(X, GOOD[0], None, *GOOD[2:], w_gate=GOOD[0], activation="relu"),
        "expected a gated unit",
    ),
    "norm_weight": (ValueError, lambda: ops.rms_norm(X, B), r"weight \(24,\) for x \(3, 24\), got \(16,\)"),
    "norm_bias": (ValueError, lambda: ops.layer_norm(X, ONES, ONES[None]), r"expected bias \(24,\)"),
    "norm_dtype": (TypeError, lambda: ops.rms_norm(X, ONES.half()), "weight in torch.float32 like x"),
    "norm_integers": (TypeError, lambda: ops.rms_norm(X.int(), ONES), "floating-point"),
    "norm_devices": (ValueError, lambda: ops.rms_norm(X, ONES.to("meta")), "one device"),
    "norm_scalar": (ValueError, lambda: ops.rms_norm(torch.ones(()), ONES[:1]), "without dimensions"),
}  # fmt: skip


@pytest.mark.parametrize(("error", "call", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_in_words(error, call, words, backend):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("name", SOME)
def test_what_is_no_recipe_and_what_fp8_cannot_serve_is_refused(name, monkeypatch):
    monkeypatch.setattr(primitives, "quantize", lambda *_: pytest.fail("something was computed"))
    case = CASES[name]
    for wrong in ("rowwise", True, False, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"expected quantize=tpkernels\.Recipe\.rowwise\(\), \.blockwise"):
            case.in_fp8(wrong).op(*case.operands((3,)))
    rowwise = case.in_fp8(RECIPES[0]).op
    with pytest.raises(TypeError, match=r"bfloat16, float16 or float32 with quantize, got torch\.float64"):
        rowwise(*case.operands((3,), torch.float64))
    with tp_invariance(4), pytest.raises(ValueError, match="expected no quantize with TP-invariance"):
        rowwise(*case.operands((3,)))


GPUS = {  # as torch describes them
    "A100": (
        (8, 0),
        None,
        "expected a GPU of compute capability 8.9 or later with quantize, got A100 of 8.0",
    ),
    "MI300X": (
        (9, 4),
        "6.3",
        r"expected an NVIDIA GPU with quantize, got MI300X: AMD's fp8 has other formats",
    ),
}


@pytest.mark.parametrize("name", GPUS)
def test_gpus_without_our_fp8_are_refused(name, monkeypatch):
    from tpkernels.ops import quantize

    capability, hip, words = GPUS[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(ValueError, match=words):
        quantize.require_recipe("linear", Recipe.rowwise(), "cuda:0")
    quantize.require_recipe("linear", None, "cuda:0")
    quantize.require_recipe("linear", Recipe.rowwise(), "cpu")
    monkeypatch.setattr(torch.version, "hip", None)
    for sound in ((8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, sound=sound: sound)
        quantize.require_recipe("linear", Recipe.rowwise(), "cuda:0")


def test_options_of_a_recipe_are_words_it_knows():
    wrongs = ("rowwise+power_of_two=no", "rowwise+head=1", "rowwise+", "columnwise", "rowwise+wgrad")
    for wrong in (*wrongs, "rowwise+fast_accumulate", "rowwise+fast_accumulate=backward"):
        with pytest.raises(ValueError, match="Recipe: expected"):
            Recipe.named(wrong)
    every = Recipe.rowwise(
        power_of_two=True, wgrad="fp8", gradients="e5m2", head=True, fast_accumulate="always"
    )
    for recipe in (*RECIPES, every, Recipe.rowwise(fast_accumulate="never")):
        assert Recipe.named(str(recipe)) == recipe


def test_scales_of_blocks_leave_nothing_to_accumulate_fast():
    with pytest.raises(ValueError, match="expected fast_accumulate='never' with blockwise scales, got 'forw"):
        Recipe("blocks", fast_accumulate="forward")
    with pytest.raises(ValueError, match="Recipe: expected"):
        Recipe.named("blockwise+fast_accumulate=always")
