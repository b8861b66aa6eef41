"""Ops run by torch and by our kernels: on a GPU, or else in Triton's interpreter; on ranks of the CPU."""

import pytest
import torch

from tpkernels.dispatch import backends


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def by(request: pytest.FixtureRequest) -> str:
    """Tests may parametrize it."""
    return str(request.param)


@pytest.fixture
def backend(by: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(backends, "backend", by)
    return by
