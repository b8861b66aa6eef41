"""What asking the chooser costs a call once it has chosen."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tests.tuning.conftest import CPU, VERSIONS, FakeTimer
from tpkernels.kernels.target import H100
from tpkernels.tuning.cache import Cache
from tpkernels.tuning.chooser import Chooser
from tpkernels.tuning.gpus import Gpu


@pytest.mark.benchmark(group="a warm choice")
@pytest.mark.parametrize("step", ["linear", "dglu"])
def test_warm_choice(benchmark: BenchmarkFixture, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPKERNELS_TUNE", "0")
    gpu = Gpu(VERSIONS.gpu, H100, 232_448)
    chooser = Chooser(CPU, gpu, FakeTimer({}), Cache(None, VERSIONS), {})
    x, w, b = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48)
    arguments = {
        "linear": ("linear", x, w, b, "gelu", True),
        "dglu": ("dglu", torch.randn(16, 48), w, x, x, "swiglu"),
    }[step]
    chooser.call(*arguments)  # type: ignore[arg-type]
    for signature in chooser._functions:
        chooser._functions[signature] = lambda *arguments: None  # the step itself is not what is timed
    benchmark(chooser.call, *arguments)
