"""DTensors of what ranks hold: torch's own form of a split tensor, which its checkpoints read and write.

    what ranks hold                              the DTensor
    copies                                       Replicate
    equal runs, or what torch.chunk gives        Shard(dim), over the parameter's own memory
    several runs each, or other sizes            Shard(dim) over `LocalShardsWrapper`, which knows where

The last kind is for checkpoints only: DTensor cannot compute with it.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from tpkernels.interop.parts import Part, parts_of, world_of
from tpkernels.layers.world import TENSOR_DIM, State


def as_dtensors(model: nn.Module, state: State = None) -> dict[str, DTensor]:
    """Each parameter and persistent buffer as a DTensor of the whole's shape, without vocabulary padding.

    They share memory with the model. All that a checkpoint by `torch.distributed.checkpoint` needs.
    """
    group = world_of(model, state).group
    return {name: as_dtensor(part, group) for name, part in parts_of(model, state).items()}


def as_dtensor(part: Part, group: ProcessGroup) -> DTensor:
    mesh = _mesh(group, part.local.device.type)
    if part.dim is None:
        return DTensor.from_local(part.local.detach(), mesh, [Replicate()], run_check=False)
    chunks = list(part.chunks())
    local: Tensor
    if _is_chunked(part):
        local = chunks[0].view
    else:
        local = LocalShardsWrapper([chunk.view for chunk in chunks], [chunk.offsets for chunk in chunks])
    return DTensor.from_local(
        local,
        mesh,
        [Shard(part.dim)],
        run_check=False,
        shape=torch.Size(part.shape),
        stride=tuple(prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))),
    )


def _mesh(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(TENSOR_DIM,))


def _is_chunked(part: Part) -> bool:
    """Whether ranks hold what `torch.chunk` would give them: the one split that Shard stands for."""
    assert part.dim is not None
    size, ranks = part.shape[part.dim], len(part.pieces)
    each = -(-size // ranks)
    return all(
        pieces == (range(min(rank * each, size), min((rank + 1) * each, size)),)
        for rank, pieces in enumerate(part.pieces)
    )
