"""RMSNorm and LayerNorm against torch's own, forward and backward."""

from __future__ import annotations

import pytest
import torch

from bench.cases.local import Local
from bench.conftest import Bench

ON_GPU = torch.cuda.is_available()
LOCAL = Local(torch.bfloat16 if ON_GPU else torch.float32, "cuda" if ON_GPU else "cpu")
SIZES = [(8192, 4096), (8192, 8192)] if ON_GPU else [(256, 256)]
ROUNDS = 21


@pytest.mark.smoke
@pytest.mark.gpu_set
@pytest.mark.parametrize(("tokens", "features"), SIZES)
@pytest.mark.parametrize("build", ["rms_norm", "layer_norm"])
def test_norm(bench: Bench, build: str, tokens: int, features: int) -> None:
    torch.manual_seed(0)
    bench.case(getattr(LOCAL, build)(tokens, features), ROUNDS)
