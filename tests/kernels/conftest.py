"""Kernels run on a GPU, or else in Triton's interpreter, which the root conftest switches on."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.checks import assert_framed
from tpkernels.gate.accuracy import Frames
from tpkernels.kernels import launch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frames]:
    """Outputs of every launcher start as NaN inside a frame of canaries, which must outlive the test."""
    frames = Frames()

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "meta":  # what has no memory has no frame
            return torch.empty(shape, dtype=dtype, device=device)
        return frames.empty(shape, dtype, device)

    monkeypatch.setattr(launch, "empty", empty)
    yield frames
    assert_framed(frames)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261121)
