"""The naive way to split a linear layer over ranks: products between collectives that block."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def all_gather(x_shard: Tensor) -> Tensor:
    x = x_shard.new_empty(x_shard.shape[0] * dist.get_world_size(), *x_shard.shape[1:])
    dist.all_gather_into_tensor(x, x_shard)
    return x


def reduce_scatter(x: Tensor) -> Tensor:
    x_shard = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(x_shard, x.contiguous())
    return x_shard


def all_reduce(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


class Gather(torch.autograd.Function):
    """Along tokens; backward sums, and scatters."""

    @staticmethod
    def forward(ctx: Any, x_shard: Tensor) -> Tensor:
        return all_gather(x_shard)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return reduce_scatter(dx)


class SumAndScatter(torch.autograd.Function):
    """Along tokens; backward gathers."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return reduce_scatter(y)

    @staticmethod
    def backward(ctx: Any, dy_shard: Tensor) -> Tensor:
        return all_gather(dy_shard)


class Copy(torch.autograd.Function):
    """The tensor itself; backward sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return all_reduce(dx)


class Sum(torch.autograd.Function):
    """Backward hands each rank the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return all_reduce(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def copied(x: Tensor) -> Tensor:
    """Return x, which is the same on all ranks; backward sums its gradient over them."""
    y: Tensor = Copy.apply(x)  # type: ignore[no-untyped-call]
    return y


def entered(x: Tensor, sequence_parallel: bool) -> Tensor:
    """Return the operand of a column-parallel product: all tokens."""
    gathered: Tensor = Gather.apply(x) if sequence_parallel else copied(x)  # type: ignore[no-untyped-call]
    return gathered


def left(y: Tensor, sequence_parallel: bool) -> Tensor:
    """What becomes of a row-parallel product."""
    total: Tensor = (SumAndScatter if sequence_parallel else Sum).apply(y)  # type: ignore[no-untyped-call]
    return total
