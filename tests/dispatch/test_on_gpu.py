"""The chooser with its real clock, on a real GPU."""

import pytest
import torch

from tpkernels.dispatch.chooser import chooser_on
from tpkernels.dispatch.products import PRODUCTS, dgrad
from tpkernels.dispatch.record import Layer
from tpkernels.dispatch.soundness import mismatch, results_of, scratch_like

pytestmark = pytest.mark.gpu


@pytest.fixture
def chooser(tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    return chooser_on.__wrapped__(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
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
