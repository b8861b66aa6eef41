"""Ops run by torch and by our kernels: on a GPU, or else in Triton's interpreter."""

import pytest
import torch

from tpkernels.dispatch import backends


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(backends, "backend", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261121)
    torch.compiler.reset()  # or cases that share a line of a test count as recompilations of one function
