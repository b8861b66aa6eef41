"""Embedding, loss, and head with loss, of one rank's part of a vocabulary, against plain torch.

On a GPU Llama-3 8B's sizes, whole and an eighth of them; on a CPU small ones, to show that the harness works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from bench.case import Case, Work
from bench.cases.differentiated import differentiated
from bench.measure import Seconds
from tpkernels import ops

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
ROUNDS = 21
TOKENS, FEATURES = (8192, 4096) if ON_GPU else (256, 64)
COLUMNS = (128256, 16032) if ON_GPU else (2048,)


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    """A rank alone: what is timed is computation."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE).requires_grad_()


def work(op: str, columns: int, naive: str, flops: int, elements: int) -> Work:
    """elements: read and written in `DTYPE`"""
    return Work(
        op=op,
        shape=f"{TOKENS}x{FEATURES}x{columns}",
        pass_="forward_backward",
        naive=naive,
        dtype=DTYPE,
        device=DEVICE,
        flops=flops,
        bytes=DTYPE.itemsize * elements,
    )


def embedding(group: ProcessGroup, columns: int) -> Case:
    ids = torch.randint(columns, (TOKENS,), device=DEVICE)
    return differentiated(
        work("embedding", columns, "F.embedding", 0, 4 * TOKENS * FEATURES + columns * FEATURES),
        lambda table: ops.vocab_embedding(ids, table, group),
        lambda table: F.embedding(ids, table),
        [normal(columns, FEATURES)],
    )


def loss(group: ProcessGroup, columns: int) -> Case:
    target = torch.randint(columns, (TOKENS,), device=DEVICE)
    return differentiated(
        work("cross_entropy", columns, "F.cross_entropy in fp32", 0, 3 * TOKENS * columns),
        lambda logits: ops.vocab_cross_entropy(logits, target, group).mean(),
        lambda logits: F.cross_entropy(logits.float(), target),
        [normal(TOKENS, columns)],
    )


def head(group: ProcessGroup, columns: int) -> Case:
    target = torch.randint(columns, (TOKENS,), device=DEVICE)
    return differentiated(
        work(
            "linear_cross_entropy",
            columns,
            "F.linear and F.cross_entropy in fp32",
            3 * 2 * TOKENS * FEATURES * columns,
            3 * FEATURES * (TOKENS + columns),
        ),
        lambda hidden, weight: ops.linear_cross_entropy(hidden, weight, target, group),
        lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).float(), target),
        [normal(TOKENS, FEATURES), normal(columns, FEATURES)],
    )


@pytest.mark.smoke
@pytest.mark.gpu_set
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("build", [embedding, loss, head], ids=lambda build: build.__name__)
def test_vocabulary(
    record: Callable[[Work, Seconds], None],
    group: ProcessGroup,
    build: Callable[[ProcessGroup, int], Case],
    columns: int,
) -> None:
    torch.manual_seed(0)
    case = build(group, columns)
    record(case.work, case.time(ROUNDS))
