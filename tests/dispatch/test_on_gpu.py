"""The chooser with its real clock, on a real GPU."""

import pytest
import torch

from tpkernels.dispatch import torch_steps
from tpkernels.dispatch.problem import STEPS
from tpkernels.dispatch.sample import Layer
from tpkernels.dispatch.scratch import scratch_like
from tpkernels.dispatch.tuned_steps import TunedSteps, chooser_on

pytestmark = pytest.mark.gpu


@pytest.fixture
def chooser(tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    return chooser_on.__wrapped__(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("step", STEPS)
def test_every_candidate_is_sound_and_the_choice_lasts(step, dtype, chooser, caplog):
    meta = Layer(512, 768, 256, dtype, "gelu_tanh").arguments(step)
    decision = chooser.timed(step, meta)
    assert decision.source == "timed"
    assert not caplog.records, "a candidate was dropped"
    assert chooser.known(step, meta).candidate == decision.candidate

    arguments = scratch_like(meta, 256, torch.device("cuda", torch.cuda.current_device()))
    tuned = getattr(TunedSteps(chooser), step)(*arguments)
    if step != "wgrad_accumulate_":
        expected = getattr(torch_steps, step)(*arguments)
        for ours, torchs in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (tuned, expected)), strict=True
        ):
            assert (ours.float() - torchs.float()).norm() <= 3e-2 * torchs.float().norm()


def test_unknown_shape_does_not_break_a_capture(chooser):
    steps = TunedSteps(chooser)
    x, w = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x @ w  # cuBLAS makes its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = steps.dgrad(x, w)
    graph.replay()
    torch.testing.assert_close(dx, x @ w)
    steps.dgrad(x, w)
    assert chooser.known("dgrad", (x, w)).milliseconds
