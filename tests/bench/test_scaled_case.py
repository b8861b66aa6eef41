"""What is timed in fp8 computes what it says, where nothing of it can be timed."""

from __future__ import annotations

import pytest
import torch

from bench.cases.scaled import OFF_BY, PASSES, case_of
from bench.shapes import SMOKE, shapes_of


@pytest.mark.parametrize("pass_", PASSES)
def test_all_ways_agree_as_far_as_fp8_does(pass_):
    torch.manual_seed(0)
    for shape in shapes_of(SMOKE, tensor=1, tokens=64):
        case = case_of(shape, pass_, torch.bfloat16, "cpu")
        assert set(case.ways) == {"ours", "blockwise", "naive"}
        case.check()
        ours, exact = case.ways["ours"]()[0].double(), case.ways["naive"]()[0].double()
        assert (ours - exact).norm() / exact.norm() > OFF_BY / 10  # it is fp8, and not the naive way
