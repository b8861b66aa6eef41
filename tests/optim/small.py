"""Matrices that are sharded in every way, and full values for them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpkernels import (
    ColumnParallelLinear,
    ParallelState,
    RowParallelLinear,
    VocabParallelEmbedding,
    create_parallel_state,
    plan_groups,
)
from tpkernels.checkpoints.full_state_dict import load_full_state_dict
from tpkernels.checkpoints.shards import TensorShard, shards_of

STEPS = 3
LR = 0.02


def state_of(tensor: int) -> ParallelState:
    """All ranks, `tensor` of them tensor-parallel, the others data-parallel."""
    return create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))


class Matrices(nn.Module):
    """Every way in which a matrix is sharded, in shapes that are wide, tall and square."""

    def __init__(self, tensor: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        state = self.state = state_of(tensor)
        where: dict[str, Any] = {"bias": False, "state": state, "dtype": dtype}
        self.wide = ColumnParallelLinear(40, 16, **where)
        self.tall = ColumnParallelLinear(8, 48, **where)
        self.stacked = ColumnParallelLinear(16, 48, stride=2, **where)
        self.row = RowParallelLinear(32, 16, **where)
        self.table = VocabParallelEmbedding(13, 8, state=state, dtype=dtype)  # padded
        self.replicated = nn.Linear(12, 20, bias=False, dtype=dtype)
        self.unused = RowParallelLinear(16, 8, **where)
        load_full_state_dict(self, values_for(self, "weights", 0, dtype), state=state)


def values_for(model: nn.Module, kind: str, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A full tensor for each parameter, the same on all ranks and at all sizes."""
    made = {}
    for name, shard in shards_of(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {step} {name}".encode()))
        made[name] = torch.randn(shard.shape, generator=generator).to(dtype)
    return made


def cut(shard: TensorShard, full: Tensor) -> Tensor:
    own = torch.zeros_like(shard.tensor)
    for chunk in shard.chunks(own):
        chunk.view.copy_(full[chunk.where])
    return own


def set_gradients(model: nn.Module, full: dict[str, Tensor]) -> None:
    for name, shard in shards_of(model).items():
        if not name.startswith("unused"):
            shard.tensor.grad = cut(shard, full[name])
