"""Between a model that ranks share and the whole tensors of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpkernels.interop.parts import Part, parts_of, require_one_stage, unwrapped, world_of
from tpkernels.interop.raise_on_all_ranks import together
from tpkernels.layers.world import State
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region


def whole_state_dict(model: nn.Module, *, state: State = None) -> dict[str, Tensor]:
    """The unsharded model's tensors by name, on the CPU of global rank 0; nothing on other ranks.

    Called by all ranks of the world. Tensors are gathered one by one, each of which needs twice its size on
    each device of the tensor-parallel group of rank 0. Of tied tensors there is the first name only.

    state: as the model was built with; by default found in its layers
    """
    with together("whole_state_dict"):
        require_one_stage(state)
        group = world_of(model, state).group
        parts = parts_of(model, state)
    if dist.get_process_group_ranks(group)[0] != 0:
        return {}  # another copy of the model
    whole: dict[str, Tensor] = {}
    for name, part in parts.items():
        tensor = _gathered(part, group)
        if dist.get_rank() == 0:
            whole[name] = tensor.to("cpu", copy=True)
    return whole


@torch.no_grad()
def load_whole(
    model: nn.Module, whole: Mapping[str, Tensor], *, cast: bool = False, state: State = None
) -> None:
    """Copy this rank's part of each whole tensor into the model; what pads a vocabulary becomes zero.

    Called by all ranks of the world. Names, shapes and dtypes are compared before anything is changed.

    whole: what `whole_state_dict` gave, on all ranks; a tensor mapped from a file is read where needed only
    cast: take tensors of another dtype too
    state: as the model was built with; by default found in its layers
    """
    with together("load_whole"):
        parts = parts_of(model, state)
        _compare(parts, whole, unwrapped(model).state_dict().keys(), cast=cast)
    for name, part in parts.items():
        for chunk in part.chunks():
            chunk.view.copy_(whole[name][chunk.where])
        part.zero_padding()


@torch.no_grad()
def _gathered(part: Part, group: ProcessGroup) -> Tensor:
    """The whole, on all ranks of the group."""
    if part.dim is None:
        return part.local.detach()
    rows = part.local.detach().movedim(part.dim, 0).contiguous()
    shards = gather_from_sequence_region(rows, group).chunk(group.size())
    whole = part.local.new_empty(part.shape)
    for rank, shard in enumerate(shards):
        for chunk in part.chunks(shard.movedim(0, part.dim), rank):
            whole[chunk.where] = chunk.view
    return whole


def _compare(parts: Mapping[str, Part], whole: Mapping[str, Tensor], known: Set[str], *, cast: bool) -> None:
    missing = [name for name in parts if name not in whole]
    surplus = [name for name in whole if name not in parts and name not in known]
    if missing or surplus:
        raise ValueError(
            f"expected the tensors of the model by name: missing are {missing or 'none'}, not in the model "
            f"are {surplus or 'none'}"
        )
    for name, part in parts.items():
        if tuple(whole[name].shape) != part.shape:
            raise ValueError(f"'{name}': expected {part.shape}, got {tuple(whole[name].shape)}")
        if whole[name].dtype != part.local.dtype and not cast:
            raise ValueError(
                f"'{name}': expected {part.local.dtype}, got {whole[name].dtype}; pass cast=True to convert"
            )
