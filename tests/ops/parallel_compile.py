"""What ranks run to compare torch.compile with eager."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.parallel_cases import Setting, prepare, shard
from tpkernels.ops.column_linear import column_linear
from tpkernels.ops.row_linear import row_linear


def pair(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor, setting: Setting) -> Tensor:
    """Up and down again: column, then row."""
    group = dist.group.WORLD
    options = {"sequence_parallel": setting.sequence_parallel, "overlap": setting.overlap}
    h, other = column_linear(x, [w, w], [b, None], group, activation=setting.activation, **options)
    return row_linear(h * other, w2, b2, group, **options)


def compiled_against_eager(setting: Setting, rows: tuple[int, ...]) -> list[bool]:
    """Whether each number of rows gives the same y and gradients, compiled once for all."""
    prepare(setting)
    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True, dynamic=True, backend="aot_eager")
    return [_same(pair, compiled, setting, count) for count in rows]


def _same(eager, compiled, setting: Setting, rows: int) -> bool:  # type: ignore[no-untyped-def]
    torch.manual_seed(rows)
    k, n = setting.features
    w, b = torch.randn(n, k), torch.randn(n)
    x, w2, b2 = torch.randn(rows, k), torch.randn(k, n), torch.randn(k)
    x = shard(x, 0) if setting.sequence_parallel else x
    whole = (x, shard(w, 0), shard(b, 0), shard(w2, 1), b2)
    results = []
    for function in (eager, compiled):
        leaves = [t.clone().requires_grad_() for t in whole]
        y = function(*leaves, setting)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        results.append([y.detach(), *grads])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
