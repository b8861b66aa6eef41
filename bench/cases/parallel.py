"""Column- and row-parallel layers and a whole MLP, forward and backward, against blocking collectives.

For ranks that a pool runs: each function is called on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case, Work
from bench.cases.blocking import copied, entered, left, world
from tpkernels import ops

TOKENS, HIDDEN, FFN = 512, 256, 1024

Function = Callable[..., Tensor]


def column(sequence_parallel: bool) -> Case:
    group = world()
    ranks = group.size()
    x = tokens_entering(sequence_parallel, ranks)
    weight, bias = normal(FFN // ranks, HIDDEN), normal(1, FFN // ranks)[0]
    return case(
        "column_linear",
        sequence_parallel,
        lambda overlap, x, w, b: ops.column_linear(
            x, w, b, group, sequence_parallel=sequence_parallel, overlap=overlap
        ),
        lambda x, w, b: F.linear(entered(x, sequence_parallel), w, b),
        [x, weight, bias],
        products=1,
        transfers=2 if sequence_parallel else 1,  # x and dx, or dx summed
    )


def row(sequence_parallel: bool) -> Case:
    group = world()
    ranks = group.size()
    x_shard, weight = normal(TOKENS, FFN // ranks), normal(HIDDEN, FFN // ranks)
    bias = normal(1, HIDDEN, replicated=True)[0]
    return case(
        "row_linear",
        sequence_parallel,
        lambda overlap, x, w, b: ops.row_linear(
            x, w, b, group, sequence_parallel=sequence_parallel, overlap=overlap
        ),
        # where tokens are split, each rank has a part of the bias's gradient, as of that of entering tokens
        lambda x, w, b: left(F.linear(x, w), sequence_parallel) + (copied(b) if sequence_parallel else b),
        [x_shard, weight, bias],
        products=1,
        transfers=2 if sequence_parallel else 1,
    )


def mlp(sequence_parallel: bool) -> Case:
    group = world()
    ranks = group.size()
    x = tokens_entering(sequence_parallel, ranks)
    w_up, w_down = normal(FFN // ranks, HIDDEN), normal(HIDDEN, FFN // ranks)

    def naive(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        h = F.gelu(F.linear(entered(x, sequence_parallel), w_up), approximate="tanh")
        return left(F.linear(h, w_down), sequence_parallel)

    return case(
        "parallel_mlp",
        sequence_parallel,
        lambda overlap, x, up, down: ops.parallel_mlp(
            x, up, None, down, None, group, sequence_parallel=sequence_parallel, overlap=overlap
        ),
        naive,
        [x, w_up, w_down],
        products=2,
        transfers=4 if sequence_parallel else 2,
    )


CASES: dict[str, Callable[[bool], Case]] = {"column": column, "row": row, "mlp": mlp}


def case_of(name: str, sequence_parallel: bool) -> Case:
    return CASES[name](sequence_parallel)


def case(
    op: str,
    sequence_parallel: bool,
    ours: Function,
    naive: Function,
    leaves: list[Tensor],
    *,
    products: int,
    transfers: int,
) -> Case:
    """ours: takes whether it may overlap, and the leaves, which naive takes too
    transfers: how often the tokens' hidden features travel, an all-reduce being one"""
    ranks = dist.get_world_size()
    dy = torch.ones_like(naive(*leaves))

    def way(function: Function) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y = function(*leaves)
            return y.detach(), *torch.autograd.grad(y, leaves, dy)

        return run

    part = "sequence_parallel" if sequence_parallel else "plain"
    elements = TOKENS * (HIDDEN + FFN // ranks) + HIDDEN * FFN // ranks
    hops = (ranks - 1) / ranks * (1 if sequence_parallel else 2)
    return Case(
        Work(
            op=op,
            shape=f"{TOKENS}x{HIDDEN}x{FFN}-{part}-world{ranks}",
            pass_="forward_backward",
            naive="F.linear and blocking collectives",
            world=ranks,
            flops=3 * products * 2 * TOKENS * HIDDEN * FFN // ranks,
            bytes=3 * products * 4 * elements,
            wire_bytes=round(transfers * 4 * TOKENS * HIDDEN * hops),
        ),
        {
            "ours": way(partial(ours, True)),
            "naive": way(naive),
            "sequential": way(partial(ours, False)),
        },
    )


def tokens_entering(sequence_parallel: bool, ranks: int) -> Tensor:
    return normal(TOKENS // ranks, HIDDEN) if sequence_parallel else normal(TOKENS, HIDDEN, replicated=True)


def normal(rows: int, cols: int, *, replicated: bool = False) -> Tensor:
    """Of the same numbers on every rank, or each rank its own."""
    generator = torch.Generator().manual_seed(0 if replicated else 1 + dist.get_rank())
    matrix: Tensor = torch.randn(rows, cols, generator=generator) / cols**0.5
    return matrix.requires_grad_()
