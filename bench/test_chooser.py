"""What asking the chooser costs a call once it has chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.case import Case, Work
from bench.measure import Seconds
from tests.dispatch.conftest import CPU, VERSIONS, FakeTimer
from tpkernels.dispatch.cache import Cache
from tpkernels.dispatch.candidates import TargetGpu
from tpkernels.dispatch.chooser import Chooser
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.kernels.target import H100


@pytest.mark.smoke
@pytest.mark.parametrize("step", ["linear", "dglu"])
def test_warm_choice(
    record: Callable[[Work, Seconds], None], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPKERNELS_TUNE", "0")
    gpu = TargetGpu(VERSIONS.gpu, H100)
    chooser = Chooser(CPU, gpu, FakeTimer({}), Cache(None, VERSIONS), {})
    x, w, b = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48)
    arguments: tuple[Any, ...] = {
        "linear": (x, w, b, "gelu", True),
        "dglu": (torch.randn(16, 48), w, x, x, "swiglu"),
    }[step]
    chooser.call(PRODUCTS[step], *arguments)
    chosen = next(iter(chooser._functions.values()))
    case = Case(
        Work("choice", "16x32x48", step, "the same step called directly", backend="torch"),
        {"ours": lambda: chooser.call(PRODUCTS[step], *arguments), "naive": lambda: chosen(*arguments)},
    )
    record(case.work, case.time(51))
