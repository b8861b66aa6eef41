"""Choices, the autotuner with its real clock, and torch's own operators, on a real GPU."""

import pytest
import torch

from tests.dispatch.conftest import call as tuned
from tests.dispatch.conftest import known, timed
from tests.dispatch.test_primitives import BOUND, assert_close
from tests.dispatch.test_scaled import OPTIONS, call
from tests.kernels.checks import DTYPES
from tpkernels.dispatch import products
from tpkernels.dispatch.autotune import autotuner_on
from tpkernels.dispatch.candidates import tune_key
from tpkernels.dispatch.checking import mismatch, results_of, scratch_like
from tpkernels.dispatch.products import PRODUCTS, dgrad
from tpkernels.dispatch.record import Layer
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.dispatch.timing import CudaStream, time_on

pytestmark = pytest.mark.gpu


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    return autotuner_on.__wrapped__(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("record", PRODUCTS.values(), ids=PRODUCTS)
def test_every_candidate_is_sound_and_the_choice_lasts(record, dtype, tuner, caplog):
    meta = record.sample(Layer(512, 768, 256, dtype, "gelu_tanh"))
    choice = timed(tuner, record, *meta)
    assert choice.source == "timed"
    assert "dropped" not in caplog.text
    assert known(tuner, record, *meta) == choice

    arguments = scratch_like(meta, 256, torch.device("cuda", torch.cuda.current_device()))
    results = results_of(record, lambda *given: tuned(tuner, record, *given), arguments)
    expected = results_of(record, record.by_torch, arguments)
    assert mismatch(results, expected, tune_key(record, *arguments)) is None


@pytest.mark.needs("fp8")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_candidate_in_fp8_is_sound(dtype, options, tuner, caplog):
    assert timed(tuner, scaled_linear, *call(512, 768, 1056, dtype=dtype, **options)).source == "timed"
    assert "dropped" not in caplog.text


def test_unknown_shape_does_not_break_a_capture(tuner):
    x, w = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x @ w  # cuBLAS makes its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = tuned(tuner, dgrad, x, w)
    graph.replay()
    torch.testing.assert_close(dx, x @ w)
    tuned(tuner, dgrad, x, w)
    assert known(tuner, dgrad, x, w).milliseconds


def test_library_operators_of_the_gpu_agree_with_torch():
    x, w, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((64, 32), (48, 32), (48,)))
    ways = products.linear.library[1].run, products.linear.by_torch
    ours, torchs = (way(x, w, b, "gelu_tanh", False)[0] for way in ways)
    assert_close([ours], [torchs], BOUND[torch.bfloat16])
    main, naive = torch.ones(2, 48, 32, device="cuda")
    dy = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    products.addmm_dtype_out(main, dy, x)
    products.wgrad_accumulate_.by_torch(naive, dy, x)
    assert (main - naive).norm() < 1e-2 * naive.norm()


def test_gpu_timer_tells_a_large_product_from_a_small_one():
    device = torch.device("cuda", torch.cuda.current_device())
    small, large = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (1024, 8192))
    times = time_on(
        CudaStream(device), {"small": lambda: small @ small, "large": lambda: large @ large}
    ).captured
    assert 0 < 4 * times["small"] < times["large"]
