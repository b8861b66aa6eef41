"""Primitives: whoever computes one computes what torch does, and who that is."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from tests.dispatch.conftest import TRITON_WINS, FakeTimer, call
from tests.kernels.checks import assert_written, rows_for
from tests.products import pairwise
from tests.segments import in_op
from tpkernels.dispatch import backends, gates, norms, primitives, products, vocabulary
from tpkernels.dispatch.candidates import tune_key
from tpkernels.dispatch.checking import results_of, scratch_like
from tpkernels.dispatch.record import Layer
from tpkernels.kernels import invariance
from tpkernels.kernels.activations import ACTIVATIONS

T, N, K = 37, 48, 40
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
NARROWING = ("quantize", "dequantize")
IN_FP8 = {name: primitives.RECORDS[name] for name in (*NARROWING, "scaled_linear")}
RECORDS = {name: record for name, record in primitives.RECORDS.items() if name not in IN_FP8}
FUNCTIONS = {
    name: next(getattr(home, name) for home in (primitives, gates, norms, vocabulary) if hasattr(home, name))
    for name in primitives.RECORDS
}
COMPILED = [name for name, record in primitives.RECORDS.items() if not record.changes_first]
WRITING = [name for name, record in products.PRODUCTS.items() if name not in ("wgrad", "wgrad_accumulate_")]
LAYERS = {
    "training": {"activation": "gelu_tanh"},
    "inference": {"activation": "relu", "training": False},
    "plain": {"activation": "none", "bias": False, "glu": "geglu"},
}
WINNERS = ["triton/descriptor", "triton/pointer", "torch", "addmm", "mm+"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def samples(record, layer):
    """Random arguments, of which ids lie in and beside the shard, and sums of exponentials are positive."""
    meta = record.sample(layer)
    arguments = []
    for argument, random in zip(meta, scratch_like(meta, 8, DEVICE), strict=True):
        if not isinstance(argument, torch.Tensor):
            arguments.append(argument)
        elif not argument.is_floating_point():
            arguments.append(torch.randint(-1, N + 5, argument.shape, device=DEVICE))
        else:
            arguments.append(random.abs() + 1 if argument.shape == (T,) else random)
    return tuple(arguments)


def assert_close(ours, torchs, bound):
    for actual, expected in zip(ours, torchs, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert actual.dtype == expected.dtype
            error = (actual.double() - expected.double()).norm()
            assert error <= bound * expected.double().norm() + 1e-30


@pairwise(name=list(products.PRODUCTS), winner=WINNERS, layer=list(LAYERS), dtype=list(BOUND))
def test_chosen_candidate_computes_what_torch_does(name, winner, layer, dtype, make_tuner):
    record, tuner = RECORDS[name], make_tuner(FakeTimer({winner: 1.0, "": 2.0}))
    arguments = samples(record, Layer(T, N, K, dtype, **LAYERS[layer]))
    with torch.no_grad():
        results = results_of(record, lambda *given: call(tuner, record, *given), arguments)
        assert_close(results, results_of(record, record.by_torch, arguments), BOUND[dtype])
        if name in WRITING:
            out, around = rows_for(results)
            call(tuner, record, *arguments, out=out)
            assert_written(out, around, results)


@pairwise(name=WRITING, layer=list(LAYERS), dtype=list(BOUND), backend=["torch", "triton"])
def test_primitive_writes_the_same_bits_into_given_tensors(name, layer, dtype, backend, monkeypatch):
    monkeypatch.setattr(backends, "backend", backend)
    primitive, record = FUNCTIONS[name], RECORDS[name]
    arguments = samples(record, Layer(T, N, K, dtype, **LAYERS[layer]))
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    with torch.no_grad():  # silu's gradient has another formula where it may be differentiated
        results = results_of(record, primitive, arguments)
        out, around = rows_for(results)
        primitives.into(primitive, out, *arguments)
    assert_written(out, around, results)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_has_the_same_bits_in_given_tensors(activation):
    for keep in (True, False):
        layer = Layer(T, N, K, torch.bfloat16, activation, training=keep, bias=keep)
        for name in ("linear", "dgrad_act"):
            arguments = samples(RECORDS[name], layer)
            with torch.no_grad():
                results = results_of(RECORDS[name], RECORDS[name].by_torch, arguments)
                out, around = rows_for(results)
                RECORDS[name].torch.into(out, *arguments)
            assert_written(out, around, results)


def test_primitive_without_a_way_into_given_tensors_is_copied():
    x, weight = torch.randn(T, K), torch.randn(K)
    results = norms.rms_norm(x, weight, 1e-5)
    out, around = rows_for(results)
    primitives.into(norms.rms_norm, out, x, weight, 1e-5)
    assert_written(out, around, results)


def test_given_tensors_are_no_way_for_autograd():
    x, w = (torch.randn(rows, K, requires_grad=True) for rows in (T, N))
    with pytest.raises(AssertionError):
        primitives.into(primitives.linear, [torch.empty(T, N)], x, w, None, "none", False)


def test_what_is_given_is_part_of_the_problem(make_tuner):
    """The same choice as for new results, but where descriptors cannot reach what is given."""
    timer = FakeTimer(TRITON_WINS)
    tuner, record = make_tuner(timer), products.dgrad
    dy, w = torch.randn(T, N).bfloat16(), torch.randn(N, K).bfloat16()
    call(tuner, record, dy, w)
    rows, flat = torch.empty(3, T, K, dtype=dy.dtype), torch.empty(T * K + 1, dtype=dy.dtype)
    call(tuner, record, dy, w, out=[rows[1]])
    assert len(timer.asked) == 1
    call(tuner, record, dy, w, out=[flat[1:].view(T, K)])
    assert len(timer.asked) == 2
    assert not any("descriptor" in name for name in timer.asked[1])
    torch.testing.assert_close(flat[1:].view(T, K), rows[1], rtol=1e-2, atol=1e-2)
    pair = [rows[1], flat[1:].view(T, K)]  # any of several decides
    key = tune_key(products.linear, dy, w.T.contiguous(), None, "gelu", True, out=pair)
    assert str(key).endswith("gelu+z rows,rows,ragged")


# torch checks a schema by sums with its inputs, which it does not know of fp8
CHECKS = {False: "ALL", True: ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")}


@pytest.mark.parametrize("name", COMPILED)
def test_operator_of_a_primitive_passes_opcheck(name):
    record = (RECORDS | IN_FP8)[name]
    overload = getattr(torch.ops.tpkernels, name).default
    narrow = samples(record, Layer(T, N, K, torch.float32, activation="gelu"))
    in_fp8 = torch.float8_e4m3fn in [getattr(argument, "dtype", None) for argument in narrow]
    torch.library.opcheck(overload, narrow, test_utils=CHECKS[in_fp8])
    wide = samples(record, Layer(T, N, K, torch.float64, activation="gelu"))
    torch.library.opcheck(overload, wide, test_utils="test_faketensor")  # sums of float64 are announced so


def test_compiled_primitives_compute_the_same_bits():
    records, layer = RECORDS | IN_FP8, Layer(T, N, K, torch.float32)
    calls = {name: samples(records[name], layer) for name in COMPILED}

    def call_all():
        return {name: FUNCTIONS[name](*arguments) for name, arguments in calls.items()}

    with torch.no_grad():  # silu's gradient has another formula where it may be differentiated
        compiled, eager = torch.compile(call_all, fullgraph=True, backend="aot_eager")(), call_all()
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def test_operator_of_a_primitive_has_no_derivative():
    x, w = (torch.randn(rows, K, requires_grad=True) for rows in (T, N))
    with pytest.raises(BackendCompilerFailed, match="tpkernels::linear: expected no gradient"):
        torch.compile(primitives.linear, backend="aot_eager")(x, w, None, "gelu", True)


def test_torch_computes_what_autograd_records(monkeypatch):
    """A kernel has no derivative."""
    monkeypatch.setattr(backends, "backend", "triton")
    x, w = (torch.randn(rows, K, device=DEVICE, requires_grad=True) for rows in (3, N))
    y, _ = primitives.linear(x, w, None, "gelu", False)
    assert y.grad_fn is not None
    with torch.no_grad():
        ours, _ = primitives.linear(x, w, None, "gelu", False)
    torch.testing.assert_close(ours, y)


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("auto", "cpu", "torch"),
        ("auto", "meta", "torch"),
        ("auto", "cuda", "fastest"),
        ("torch", "cuda", "torch"),
        ("triton", "cuda", "triton"),
        ("triton", "cpu", "triton"),
    ],
)
def test_backend_of_a_device(backend, device, expected, monkeypatch):
    monkeypatch.setattr(backends, "backend", backend)
    assert backends.resolve_backend(torch.device(device)) == expected


@pytest.mark.parametrize("resolved", ["fastest", "invariant"])
@pytest.mark.parametrize(
    ("name", "dtype", "width", "ours"),
    [
        ("rms_norm", torch.float32, K, True),
        ("rms_norm", torch.float64, K, False),
        ("rms_norm", torch.float32, norms.MAX_FEATURES + 1, False),
        ("softmax_statistics", torch.bfloat16, K, True),
        ("softmax_statistics", torch.float64, K, False),
        ("quantize", torch.float32, K, True),
        ("quantize", torch.float64, K, False),
    ],
)
def test_what_kernels_do_not_take_is_torchs_on_a_gpu(name, dtype, width, ours, resolved, monkeypatch):
    monkeypatch.setattr(backends, "backend", "elsewhere")
    monkeypatch.setattr(backends, "resolve_backend", lambda device: resolved)
    record = primitives.RECORDS[name]
    monkeypatch.setitem(primitives.RECORDS, name, record)  # which `primitive_in_place` replaces
    told = replace(record, by_kernel=lambda *_: "kernel", by_torch=lambda *_: "torch")
    computed = primitives.primitive_in_place(told)(torch.ones(2, width, dtype=dtype), None, width, 0)
    assert computed == ("kernel" if ours else "torch")


def test_float64_is_dequantized_by_torch():
    data, scale = torch.ones(2, K).to(torch.float8_e4m3fn), torch.ones(2, 1)
    takes = primitives.RECORDS["dequantize"].on_gpu
    assert takes(data, scale, "bfloat16")
    assert not takes(data, scale, "float64")


def test_tuner_is_asked_unless_batches_must_not_matter(monkeypatch, make_tuner):
    monkeypatch.setattr(backends, "backend", "elsewhere")
    timer = FakeTimer(TRITON_WINS)
    tuner = make_tuner(timer)
    monkeypatch.setattr(primitives, "autotuner_on", lambda device: tuner)
    dy, w = torch.randn(T, N), torch.randn(N, K)
    for resolved, timings in (("invariant", 0), ("fastest", 1), ("triton", 1), ("torch", 1)):
        monkeypatch.setattr(backends, "resolve_backend", lambda device, resolved=resolved: resolved)
        torch.testing.assert_close(primitives.dgrad(dy, w), dy @ w)
        assert len(timer.asked) == timings


@pytest.fixture
def resolved(monkeypatch, caplog):
    """Who computes on a device in a new process, asked twice, and what it says of that."""

    def resolved(device=CUDA, backend="auto"):
        monkeypatch.setattr(backends, "backend", backend)
        backends._resolved.cache_clear()
        caplog.clear()
        assert backends.resolve_backend(device) == backends.resolve_backend(device)
        return backends.resolve_backend(device), caplog.messages

    yield resolved
    backends._resolved.cache_clear()


def test_without_triton_torch_computes_and_says_so_once(resolved, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    backend, (said,) = resolved()
    assert backend == "torch"
    assert "torch computes on cuda:0: Triton is not installed" in said


def test_batch_invariance_leaves_no_choice_and_warns_of_torch(resolved, monkeypatch):
    monkeypatch.setattr(invariance, "batch_invariant", True)
    assert resolved() == ("invariant", [])
    backend, (said,) = resolved(backend="torch")
    assert backend == "torch"
    assert "TPKERNELS_BATCH_INVARIANT=1 promises nothing there" in said


def test_tp_invariance_takes_kernels_on_gpus_and_torch_on_cpus(resolved):
    dy = torch.randn(5, 8)
    with in_op(8):
        assert resolved() == ("invariant", [])
        assert resolved(torch.device("cpu")) == ("torch", [])
        assert products.bias_grad.on_gpu(dy), "torch's order of rows depends on the columns"
        assert not products.bias_grad.on_gpu(dy.double())
    assert resolved() == ("fastest", [])
    assert not products.bias_grad.on_gpu(dy)


def test_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "backend", "cuda")
    with pytest.raises(ValueError, match="TPKERNELS_BACKEND is 'cuda'; expected one of auto, torch, triton"):
        vocabulary.lookup(torch.tensor([1]), torch.ones(2, 2), 0)
