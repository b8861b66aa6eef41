"""The host cost of an op against `F.linear`: products so tiny that nothing else counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case, Work
from bench.measure import Seconds
from tpkernels import ops

PROMISED = {"forward": 1 / 2, "forward_backward": 1 / 1.3, "inference": 1 / 2}


@pytest.mark.smoke
@pytest.mark.gpu_set
@pytest.mark.parametrize("pass_", PROMISED)
def test_host_cost(record: Callable[[Work, Seconds], None], pass_: str) -> None:
    operands = [torch.randn(shape, requires_grad=True) for shape in ((4, 16), (16, 16), (16,))]
    dy = torch.ones(4, 16)

    def way(linear: Callable[..., Tensor]) -> Callable[[], Sequence[Tensor]]:
        def forward() -> Sequence[Tensor]:
            return (linear(*operands),)

        def forward_backward() -> Sequence[Tensor]:
            return torch.autograd.grad(linear(*operands), operands, dy)

        return forward_backward if pass_ == "forward_backward" else forward

    case = Case(
        Work("host_cost", "4x16x16", pass_, "F.linear", least_ratio=round(PROMISED[pass_], 3)),
        {"ours": way(ops.linear), "naive": way(F.linear)},
    )
    with torch.set_grad_enabled(pass_ != "inference"):
        record(case.work, case.time(101))
