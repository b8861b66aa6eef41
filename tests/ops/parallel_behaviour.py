"""Small models over a group, and how ranks run them, in tests of how ops behave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.parallel_cases import leaf, shard
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp


def block(x: Tensor, w: Tensor, w2: Tensor, group: dist.ProcessGroup | None = None, **options: Any) -> Tensor:
    group = group or dist.group.WORLD
    h = column_linear(x, w, None, group, activation="gelu", **options)
    return row_linear(h, w2, None, group, **options)


def operands_of(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    x, w, w2 = torch.randn(16, 24), torch.randn(32, 24) / 5, torch.randn(24, 32) / 5
    return [shard(x, 0), shard(w, 0), shard(w2, 1)]


def with_gradients(function: Callable[..., Tensor], operands: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [leaf(t) for t in operands]
    y = function(*leaves, **options)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)]


def mlp(x: Tensor, w: Tensor, w2: Tensor, *, gated: bool = False, **options: Any) -> Tensor:
    gate, bias = (w.flip(0), None) if gated else (None, w[:, 0])
    return parallel_mlp(x, w, bias, w2, w2[:, 0], dist.group.WORLD, w_gate_shard=gate, **options)


def meet(event: str) -> None:
    """Wait for all ranks, by the store: connections may be closed."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(event, 1) == dist.get_world_size():
        store.set(f"{event} now", "")
    store.wait([f"{event} now"])


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
