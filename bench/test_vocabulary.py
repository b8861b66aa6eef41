"""Embedding, loss, and head with loss, of one rank's part of a vocabulary, against plain torch.

On a GPU Llama-3 8B's sizes, whole and an eighth of them; on a CPU small ones, to show that the harness works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from bench.measure import Comparison, interleave, seconds_on_cpu, seconds_on_gpu
from tpkernels import ops

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
ROUNDS = 21 if ON_GPU else 9
TOKENS, FEATURES = (8192, 4096) if ON_GPU else (256, 64)
COLUMNS = (128256, 16032) if ON_GPU else (2048,)

Function = Callable[..., Tensor]
Ways = tuple[Function, Function, Sequence[Tensor]]  # ours, plain torch's, and what both take


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    """A rank alone: what is timed is computation."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE).requires_grad_()


def embedding(group: ProcessGroup, columns: int) -> Ways:
    ids = torch.randint(columns, (TOKENS,), device=DEVICE)
    return (
        lambda table: ops.vocab_embedding(ids, table, group),
        lambda table: F.embedding(ids, table),
        [normal(columns, FEATURES)],
    )


def loss(group: ProcessGroup, columns: int) -> Ways:
    target = torch.randint(columns, (TOKENS,), device=DEVICE)
    return (
        lambda logits: ops.vocab_cross_entropy(logits, target, group).mean(),
        lambda logits: F.cross_entropy(logits.float(), target),
        [normal(TOKENS, columns)],
    )


def head(group: ProcessGroup, columns: int) -> Ways:
    target = torch.randint(columns, (TOKENS,), device=DEVICE)
    return (
        lambda hidden, weight: ops.linear_cross_entropy(hidden, weight, target, group),
        lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).float(), target),
        [normal(TOKENS, FEATURES), normal(columns, FEATURES)],
    )


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("case", [embedding, loss, head], ids=lambda case: case.__name__)
def test_vocabulary(
    benchmark: BenchmarkFixture, group: ProcessGroup, case: Callable[[ProcessGroup, int], Ways], columns: int
) -> None:
    """Forward and backward."""
    torch.manual_seed(0)
    ours, naive, operands = case(group, columns)

    def way(function: Function) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y = function(*operands)
            return y, *torch.autograd.grad(y, operands, torch.ones_like(y))

        return run

    ways = {"ours": way(ours), "naive": way(naive)}
    for actual, expected in zip(*(run() for run in ways.values()), strict=True):
        assert (actual.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()
    seconds = interleave(ways, ROUNDS + 3, seconds_on_gpu if ON_GPU else seconds_on_cpu)
    comparison = Comparison(seconds["ours"][3:], seconds["naive"][3:])  # the first rounds warm up
    benchmark.extra_info |= comparison.as_info() | {"dtype": str(DTYPE), "device": str(DEVICE)}
    print(f"\n{case.__name__} of {columns} columns: {comparison}")
    benchmark.pedantic(ways["ours"], rounds=3)  # type: ignore[no-untyped-call]
