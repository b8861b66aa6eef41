"""Tuned steps compute what torch's do, whoever is chosen, and who serves which device."""

import pytest
import torch

from tests.dispatch.conftest import TRITON_WINS, FakeTimer
from tpkernels.dispatch import steps, torch_steps, triton_steps, tuned_steps
from tpkernels.dispatch.library_steps import addmm_, addmm_activation, addmm_dtype_out
from tpkernels.dispatch.tuned_steps import TunedSteps
from tpkernels.kernels import invariance

T, N, K = 37, 48, 40
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def close(actual, expected, bound):
    if expected is None:
        return actual is None
    error = (actual.float() - expected.float()).norm()
    return actual.dtype == expected.dtype and error <= bound * expected.float().norm()


def calls(dtype):
    def normal(*shape):
        return torch.randn(shape).to(dtype)

    return {
        "linear": (normal(T, K), normal(N, K), normal(N), "gelu_tanh", True),
        "linear_plain": (normal(T, K), normal(N, K), None, "none", False),
        "linear_relu": (normal(T, K), normal(N, K), normal(N), "relu", False),
        "glu": (normal(T, K), normal(N, K), normal(N, K), "swiglu", True),
        "glu_only": (normal(T, K), normal(N, K), normal(N, K), "geglu", False),
        "dgrad": (normal(T, N), normal(N, K)),
        "dgrad_act": (normal(T, N), normal(N, K), normal(T, K), "gelu", True),
        "dgrad_act_only": (normal(T, N), normal(N, K), normal(T, K), "silu", False),
        "dglu": (normal(T, N), normal(N, K), normal(T, K), normal(T, K), "swiglu"),
        "wgrad": (normal(T, N), normal(T, K)),
        "bias_grad": (normal(T, N),),
    }


@pytest.mark.parametrize("dtype", BOUND, ids=["fp32", "bf16"])
@pytest.mark.parametrize("winner", ["triton/descriptor", "triton/pointer", "torch", "addmm"])
@pytest.mark.parametrize("case", calls(torch.float32))
def test_tuned_step_agrees_with_torch(case, winner, dtype, make_chooser):
    step = case.partition("_only")[0].partition("_plain")[0].partition("_relu")[0]
    arguments = calls(dtype)[case]
    tuned = TunedSteps(make_chooser(FakeTimer({winner: 1.0, "": 2.0})))
    actual, expected = (getattr(by, step)(*arguments) for by in (tuned, torch_steps))
    if isinstance(expected, torch.Tensor):
        actual, expected = (actual,), (expected,)
    assert all(close(ours, torchs, BOUND[dtype]) for ours, torchs in zip(actual, expected, strict=True))


def test_norms_that_kernels_do_not_take_are_torchs(make_chooser, monkeypatch):
    monkeypatch.setattr(triton_steps, "norm", lambda *_: "ours")
    tuned = TunedSteps(make_chooser(FakeTimer({"": 1.0})))
    weight = torch.ones(K)
    assert tuned.norm(torch.randn(T, K), weight, None, "rms_norm", 1e-5) == "ours"
    wide = torch.randn(2, tuned_steps.MAX_FEATURES + 1)
    for x in (wide, torch.randn(T, K).double()):
        y, *_ = tuned.norm(x, torch.ones(x.shape[1]), None, "rms_norm", 1e-5)
        assert y.shape == x.shape


@pytest.mark.parametrize("main_dtype", BOUND, ids=["fp32", "bf16"])
@pytest.mark.parametrize("winner", ["triton/descriptor", "torch", "addmm"])
def test_tuned_accumulation_adds(winner, main_dtype, make_chooser):
    dy, x = torch.randn(T, N).bfloat16(), torch.randn(T, K).bfloat16()
    ours, torchs = torch.ones(2, N, K, dtype=main_dtype)
    TunedSteps(make_chooser(FakeTimer({winner: 1.0, "": 2.0}))).wgrad_accumulate_(ours, dy, x)
    torch_steps.wgrad_accumulate_(torchs, dy, x)
    assert (ours - torchs).norm() < 1e-2 * torchs.norm()


def test_library_compositions_agree_with_torch():
    x, w, b = torch.randn(T, K), torch.randn(N, K), torch.randn(N)
    torch.testing.assert_close(
        addmm_activation(x, w, b, "relu", False), torch_steps.linear(x, w, b, "relu", False)
    )
    ours, torchs = torch.ones(2, N, K)
    addmm_(ours, torch.ones(T, N), x)
    torch_steps.wgrad_accumulate_(torchs, torch.ones(T, N), x)
    torch.testing.assert_close(ours, torchs)


@pytest.mark.gpu
def test_library_compositions_of_the_gpu_agree_with_torch():
    x, w, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((64, 32), (48, 32), (48,)))
    ours, torchs = (by(x, w, b, "gelu_tanh", False)[0] for by in (addmm_activation, torch_steps.linear))
    assert close(ours, torchs, BOUND[torch.bfloat16])
    main, naive = torch.ones(2, 48, 32, device="cuda")
    dy = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    addmm_dtype_out(main, dy, x)
    torch_steps.wgrad_accumulate_(naive, dy, x)
    assert (main - naive).norm() < 1e-2 * naive.norm()


CUDA = torch.device("cuda", 0)


@pytest.fixture
def _chooser_without_a_gpu(monkeypatch, make_chooser):
    monkeypatch.setattr(tuned_steps, "chooser_on", lambda device: make_chooser(FakeTimer(TRITON_WINS)))
    steps._by.cache_clear()
    yield
    steps._by.cache_clear()


@pytest.mark.usefixtures("_chooser_without_a_gpu")
def test_who_serves_which_device(monkeypatch):
    monkeypatch.setattr(steps, "backend", "auto")
    assert isinstance(steps.steps_on(CUDA), TunedSteps)
    assert steps.steps_on(CUDA) is steps.steps_on(CUDA)
    assert steps.steps_on(torch.device("cpu")) is torch_steps
    monkeypatch.setattr(steps, "backend", "torch")
    assert steps.steps_on(CUDA) is torch_steps
    monkeypatch.setattr(steps, "backend", "triton")
    assert steps.steps_on(CUDA) is triton_steps


@pytest.mark.usefixtures("_chooser_without_a_gpu")
def test_without_triton_a_gpu_is_served_by_torch_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(steps, "backend", "auto")
    monkeypatch.setattr(steps, "find_spec", lambda name: None)
    for _ in range(2):
        assert steps.steps_on(CUDA) is torch_steps
    assert caplog.text.count("torch computes on cuda:0: Triton is not installed") == 1


@pytest.mark.usefixtures("_chooser_without_a_gpu")
def test_batch_invariance_leaves_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(steps, "backend", "auto")
    monkeypatch.setattr(invariance, "batch_invariant", True)
    assert steps.steps_on(CUDA) is triton_steps


@pytest.mark.usefixtures("_chooser_without_a_gpu")
def test_batch_invariance_that_torch_does_not_keep_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(steps, "backend", "torch")
    monkeypatch.setattr(invariance, "batch_invariant", True)
    for _ in range(2):
        assert steps.steps_on(CUDA) is torch_steps
    assert caplog.text.count("TPKERNELS_BATCH_INVARIANT=1 promises nothing there") == 1
