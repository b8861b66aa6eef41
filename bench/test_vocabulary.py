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
FEATURES = 4096 if ON_GPU else 64
SMOKE = [(8192, 128256), (8192, 16032)] if ON_GPU else [(256, 2048)]  # tokens, columns
LARGER = [] if ON_GPU else [(2048, 2048), (256, 16384)]


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    """A rank alone: what is timed is computation."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE).requires_grad_()


def work(op: str, tokens: int, columns: int, naive: str, flops: int, elements: int) -> Work:
    """elements: read and written in `DTYPE`"""
    return Work(
        op=op,
        shape=f"{tokens}x{FEATURES}x{columns}",
        pass_="forward_backward",
        naive=naive,
        dtype=DTYPE,
        device=DEVICE,
        flops=flops,
        bytes=DTYPE.itemsize * elements,
    )


def embedding(group: ProcessGroup, tokens: int, columns: int) -> Case:
    ids = torch.randint(columns, (tokens,), device=DEVICE)
    return differentiated(
        work("embedding", tokens, columns, "F.embedding", 0, 4 * tokens * FEATURES + columns * FEATURES),
        lambda table: ops.vocab_embedding(ids, table, group),
        lambda table: F.embedding(ids, table),
        [normal(columns, FEATURES)],
    )


def loss(group: ProcessGroup, tokens: int, columns: int) -> Case:
    target = torch.randint(columns, (tokens,), device=DEVICE)
    return differentiated(
        work("cross_entropy", tokens, columns, "F.cross_entropy in fp32", 0, 3 * tokens * columns),
        lambda logits: ops.vocab_cross_entropy(logits, target, group).mean(),
        lambda logits: F.cross_entropy(logits.float(), target),
        [normal(tokens, columns)],
    )


def head(group: ProcessGroup, tokens: int, columns: int) -> Case:
    target = torch.randint(columns, (tokens,), device=DEVICE)
    return differentiated(
        work(
            "linear_cross_entropy",
            tokens,
            columns,
            "F.linear and F.cross_entropy in fp32",
            3 * 2 * tokens * FEATURES * columns,
            3 * FEATURES * (tokens + columns),
        ),
        lambda hidden, weight: ops.linear_cross_entropy(hidden, weight, target, group),
        lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).float(), target),
        [normal(tokens, FEATURES), normal(columns, FEATURES)],
    )


@pytest.mark.gpu_set
@pytest.mark.parametrize(
    ("tokens", "columns"),
    [*(pytest.param(*sizes, marks=pytest.mark.smoke, id=str(sizes[1])) for sizes in SMOKE), *LARGER],
)
@pytest.mark.parametrize("build", [embedding, loss, head], ids=lambda build: build.__name__)
def test_vocabulary(
    record: Callable[[Work, Seconds], None],
    group: ProcessGroup,
    build: Callable[[ProcessGroup, int, int], Case],
    tokens: int,
    columns: int,
) -> None:
    torch.manual_seed(0)
    case = build(group, tokens, columns)
    record(case.work, case.time(ROUNDS))
