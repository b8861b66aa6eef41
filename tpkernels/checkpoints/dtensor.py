"""Shards as DTensors, for torch's checkpoints to read and write.

    tensor                                              DTensor
    replicated                                          Replicate
    one range for each rank, as torch.chunk splits      Shard(dim), over the parameter's own memory
    several ranges for each rank, or other sizes        Shard(dim) over `LocalShardsWrapper`
    split by tensor-parallel ranks and fully_shard      the same; over the tensor-parallel ranks only
    a DTensor of the full shape                         as it is

`LocalShardsWrapper` is for checkpoints only: DTensor cannot compute with it. `_Shards` adds to it what
DTensor.from_local needs of shards with three or more dimensions, such as stacked experts.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from tpkernels.checkpoints.shards import TensorShard, shards_of, world_of
from tpkernels.layers.world import TENSOR_DIM, State


def as_dtensors(model: nn.Module, state: State = None) -> dict[str, DTensor]:
    """Return each parameter and persistent buffer as a DTensor of the full shape, without vocabulary padding.

    The DTensors share memory with the model; `torch.distributed.checkpoint` saves and loads them.
    """
    group = world_of(model, state).group
    return {name: as_dtensor(shard, group) for name, shard in shards_of(model, state).items()}


def as_dtensor(shard: TensorShard, group: ProcessGroup) -> DTensor:
    """Return `shard` as a DTensor of the full shape over `group`, in the memory of the shard."""
    if shard.dim is None and isinstance(shard.tensor, DTensor):
        return cast(DTensor, shard.tensor.detach())
    device_type = shard.local.device.type
    return over_mesh(shard, DeviceMesh.from_group(group, device_type, mesh_dim_names=(TENSOR_DIM,)))


def over_mesh(shard: TensorShard, mesh: DeviceMesh) -> DTensor:
    """Return `shard` as a DTensor of the full shape over a mesh of the tensor-parallel ranks."""
    if shard.dim is None:
        return DTensor.from_local(shard.local.detach(), mesh, [Replicate()], run_check=False)
    chunks = list(shard.chunks())
    local: Tensor
    if is_chunked(shard) and not isinstance(shard.tensor, DTensor):
        local = chunks[0].view
    else:
        local = _Shards([chunk.view for chunk in chunks], [chunk.offsets for chunk in chunks])
    return DTensor.from_local(
        local,
        mesh,
        [Shard(shard.dim)],
        run_check=False,
        shape=torch.Size(shard.shape),
        stride=tuple(prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape))),
    )


class _Shards(LocalShardsWrapper):
    """Shards of any number of dimensions; torch's own refuses a view of more than two."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has these arguments, too
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.view.default:  # DTensor.from_local views the shards as they are
            (shards, _) = args
            return cls(shards.local_shards(), shards.local_offsets())
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def is_chunked(shard: TensorShard) -> bool:
    """Whether ranks hold the ranges that `torch.chunk` would give them, as `Shard` assumes."""
    assert shard.dim is not None
    size, ranks = shard.shape[shard.dim], len(shard.ranges)
    each = -(-size // ranks)
    return all(
        ranges == (range(min(rank * each, size), min((rank + 1) * each, size)),)
        for rank, ranges in enumerate(shard.ranges)
    )
