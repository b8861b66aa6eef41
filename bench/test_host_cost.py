"""What an op costs on the host beside `F.linear`: products so tiny that nothing else counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn import functional as F

from bench.measure import compare
from tpkernels import ops

CALLS = 200  # a round: one call is too short for a clock


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward_backward"])
def test_host_cost(benchmark: BenchmarkFixture, backward: bool) -> None:
    operands = [torch.randn(shape, requires_grad=True) for shape in ((4, 16), (16, 16), (16,))]
    dy = torch.ones(4, 16)

    def way(linear: Callable[..., Tensor]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(CALLS):
                y = linear(*operands)
                if backward:
                    torch.autograd.grad(y, operands, dy)

        return calls

    ours, naive = way(ops.linear), way(F.linear)
    comparison = compare(ours, naive, rounds=101)
    benchmark.extra_info |= comparison.as_info()
    print(f"\nhost cost: {1 / comparison.ratio:.2f} times that of F.linear")
    benchmark.pedantic(ours, rounds=3)  # type: ignore[no-untyped-call]
