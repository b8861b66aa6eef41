"""Kernels run on a GPU, or else in Triton's interpreter, which the root conftest switches on."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.checks import assert_framed
from tpkernels.gate.numerics import Frames
from tpkernels.kernels import launch, launch_plans


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

    monkeypatch.setattr(launch, "allocate", empty)
    yield frames
    assert_framed(frames)


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> None:
    """Tests change what no key has, such as the targets that there are."""
    launch_plans.forget()
