"""The chooser with its real clock, on a real GPU."""

import pytest
import torch

from tests.dispatch.test_scaled import OPTIONS, call
from tests.kernels.checks import DTYPES
from tpkernels.dispatch.chooser import chooser_on
from tpkernels.dispatch.products import PRODUCTS, dgrad
from tpkernels.dispatch.record import Layer
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.dispatch.soundness import mismatch, results_of, scratch_like
from tpkernels.kernels.target import fp8_obstacle, target_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def chooser(tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    return chooser_on.__wrapped__(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("record", PRODUCTS.values(), ids=PRODUCTS)
def test_every_candidate_is_sound_and_the_choice_lasts(record, dtype, chooser, caplog):
    meta = record.sample(Layer(512, 768, 256, dtype, "gelu_tanh"))
    decision = chooser.timed(record, meta)
    assert decision.source == "timed"
    assert not caplog.records, "a candidate was dropped"
    assert chooser.known(record, meta).candidate == decision.candidate

    arguments = scratch_like(meta, 256, torch.device("cuda", torch.cuda.current_device()))
    tuned = results_of(record, lambda *given: chooser.call(record, *given), arguments)
    expected = results_of(record, record.by_torch, arguments)
    assert mismatch(tuned, expected, record.problem(*arguments)) is None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_candidate_in_fp8_is_sound(dtype, options, chooser, caplog):
    if fp8_obstacle(target_of(torch.device("cuda", torch.cuda.current_device()))):
        pytest.skip("needs a GPU that multiplies fp8")
    assert chooser.timed(scaled_linear, call(512, 768, 1056, dtype=dtype, **options)).source == "timed"
    assert not caplog.records, "a candidate was dropped"


def test_unknown_shape_does_not_break_a_capture(chooser):
    x, w = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x @ w  # cuBLAS makes its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = chooser.call(dgrad, x, w)
    graph.replay()
    torch.testing.assert_close(dx, x @ w)
    chooser.call(dgrad, x, w)
    assert chooser.known(dgrad, (x, w)).milliseconds
