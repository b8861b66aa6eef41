"""What the numerical half of the check says of a result."""

import math

import pytest
import torch

from tpkernels.gate.numerics import Frames, NumericCase, examine
from tpkernels.registered.numeric_cases import cases

EXACT = torch.linspace(1, 2, 12, dtype=torch.float64).view(3, 4)
RESULTS = {
    "right": (EXACT.float(), ""),
    "missing": (None, "y is missing"),
    "cut": (EXACT.float()[:2], r"y has shape (2, 4), expected (3, 4)"),
    "unwritten": (torch.full((3, 4), math.nan), "y holds NaN"),
    "wrong": (2 * EXACT.float(), "y is off by 3.33e+06 times the bound"),
}


@pytest.mark.parametrize(("actual", "failure"), RESULTS.values(), ids=RESULTS.keys())
def test_flaw_of_a_result_is_told(actual, failure):
    told = examine(NumericCase("case", lambda: {"x": (EXACT.float(), EXACT), "y": (actual, EXACT)}), Frames())
    assert told.failure == failure
    assert (told.error < 1) == (failure == "")


def test_kernel_that_does_not_run_is_a_finding():
    def broken():
        raise RuntimeError("no such block")

    assert examine(NumericCase("case", broken), Frames()).failure == "RuntimeError: no such block"


def test_store_outside_an_output_is_a_finding_of_its_case_alone():
    frames = Frames()

    def careless():
        y = frames.empty((3, 4), torch.float32, torch.device("cpu"))
        y.copy_(EXACT)
        y.as_strided((13,), (1,))[12] = 0.0
        return {"y": (y, EXACT)}

    assert examine(NumericCase("case", careless), frames).failure == "written outside an output"
    sound = NumericCase("case", lambda: {"y": (EXACT.float(), EXACT)})
    assert examine(sound, frames).failure == ""


def test_cases_in_fp32_and_of_a_split_depth_are_what_they_are_called():
    fp32 = next(one for one in cases() if one.name == "scaled_linear_fwd/pointer/fp8/rows/=fp32")
    assert {found.dtype for found, _ in fp32.run().values()} == {torch.float32}
    names = {case.name: case.run.args[0].tile for case in cases() if case.name.endswith("/split")}
    assert len(names) == 9
    assert {tile.splits for tile in names.values()} == {3}
