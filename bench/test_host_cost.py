"""The host cost of an op against `F.linear`: products so tiny that nothing else counts."""

from __future__ import annotations

import pytest
import torch

from bench.case import Case, Work
from bench.cases.host_cost import PASSES, ways
from bench.conftest import Bench

PROMISED = dict(zip(PASSES, (1 / 2, 1 / 1.3, 1 / 2), strict=True))


@pytest.mark.smoke
@pytest.mark.gpu_set
@pytest.mark.parametrize("pass_", PASSES)
def test_host_cost(bench: Bench, pass_: str) -> None:
    promised = round(PROMISED[pass_], 3)
    case = Case(Work("host_cost", "4x16x16", pass_, "F.linear", least_ratio=promised), ways(pass_, "cpu"))
    with torch.set_grad_enabled(pass_ != "inference"):
        bench.case(case, 101)
