"""Gathers a sharded model's weights to the unsharded model's full tensors, and loads these."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.checkpoints.shards import (
    TensorShard,
    require_alike,
    require_one_stage,
    shards_of,
    unwrapped,
    world_of,
)
from tpkernels.layers.world import State
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region


def full_state_dict(
    model: nn.Module, *, names: Container[str] | None = None, state: State = None
) -> dict[str, Tensor]:
    """Return the unsharded model's tensors by name, on the CPU of global rank 0; an empty dict elsewhere.

    Called by all ranks of the world. Tensors are gathered one by one; each takes twice its full size on each
    device of the tensor-parallel group of rank 0, and under `fully_shard` a shard on the others. A tensor
    with several names is returned under its first name.

    names: gather these only, the same on all ranks
    state: as the model was built with; by default found in its layers
    """
    with raise_on_all_ranks("full_state_dict"):
        require_one_stage(state)
        group = world_of(model, state).group
        shards = shards_of(model, state)
    has_rank_0 = dist.get_process_group_ranks(group)[0] == 0  # other groups hold replicas of the model
    full: dict[str, Tensor] = {}
    for name, shard in shards.items():
        if names is not None and name not in names:
            continue
        held = shard.gathered()
        if not has_rank_0:
            continue
        tensor = _gathered(held, group)
        if dist.get_rank() == 0:
            full[name] = tensor.to("cpu", copy=True)
    return full


def load_full_state_dict(
    model: nn.Module, full: Mapping[str, Tensor], *, cast: bool = False, state: State = None
) -> None:
    """Copy this rank's shard of each full tensor into the model; vocabulary padding becomes zero.

    Called by all ranks of the world. Names, shapes and dtypes are compared before anything is changed.

    full: what `full_state_dict` returned, on all ranks; of a memory-mapped tensor only the shard is read
    cast: convert tensors of another dtype
    state: as the model was built with; by default found in its layers
    """
    with raise_on_all_ranks("load_full_state_dict"):
        shards = shards_of(model, state)
        aliases = unwrapped(model).state_dict(keep_vars=True).keys()
        problem = "expected the tensors of the model by name:"
        require_alike(shards, full, problem, cast=cast, aliases=aliases)
    copy_shards(shards, full)


class Sliceable(Protocol):
    """A full tensor, or an object that makes slices of one."""

    def __getitem__(self, where: tuple[slice, ...], /) -> Tensor: ...


@torch.no_grad()
def copy_shards(shards: Mapping[str, TensorShard], full: Mapping[str, Sliceable]) -> None:
    """Copy each shard's slices of the full tensor of its name into the model; padding becomes zero."""
    for name, shard in shards.items():
        tensor = full[name]
        for chunk in shard.chunks():
            chunk.view.copy_(tensor[chunk.where])
        shard.zero_padding()


@torch.no_grad()
def _gathered(shard: TensorShard, group: ProcessGroup) -> Tensor:
    """The full tensor, on all ranks of the group."""
    if shard.dim is None:
        return shard.local.detach()
    rows = shard.local.detach().movedim(shard.dim, 0).contiguous()
    gathered = gather_from_sequence_region(rows, group).chunk(group.size())
    full = shard.local.new_empty(shard.shape)
    for rank, local in enumerate(gathered):
        for chunk in shard.chunks(local.movedim(0, shard.dim), rank):
            full[chunk.where] = chunk.view
    return full
