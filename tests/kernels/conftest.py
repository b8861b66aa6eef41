"""Without a GPU every kernel here runs in Triton's interpreter; with one, on it. The tests are the same."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "triton was imported before tests/kernels/conftest.py could choose its interpreter"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

from tests.kernels.checks import Frames
from tpkernels.kernels import launch

# derandomize: a red run is red for everyone; a kernel in the interpreter is slow, so no deadline
settings.register_profile("kernels", derandomize=True, deadline=None, max_examples=15, database=None)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frames]:
    """Outputs of every launcher start as NaN inside a frame of canaries, which must outlive the test."""
    frames = Frames()
    monkeypatch.setattr(launch, "empty", frames.empty)
    yield frames
    frames.check()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261121)
