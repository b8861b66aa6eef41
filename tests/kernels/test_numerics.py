"""Launchers are as accurate as their dtypes allow: the gate's cases, each form, dtype and epilogue once."""

import pytest
import torch

from tpkernels.gate.numerics import Frames, NumericCase, examine
from tpkernels.kernels import launch
from tpkernels.registered.numeric_cases import cases

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU `qualify` computes these cases")


def chosen() -> list[NumericCase]:
    """Of all that `make gate` computes."""
    seen: set[tuple[str, int, str]] = set()
    found = []
    for case in cases():
        launcher, *parts = case.name.split("/")
        traits = {(launcher, place, part) for place, part in enumerate(parts)}
        if not traits <= seen:
            found.append(case)
            seen |= traits
    return found


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.name)
def test_launcher_is_as_accurate_as_its_dtype_allows(case, monkeypatch):
    frames = Frames()
    monkeypatch.setattr(launch, "allocate", frames.empty)
    assert examine(case, frames).failure == ""
