"""Refuses torch's data-parallel wrappers over ranks that hold different shards of a layer's weight.

Such a wrapper would average different rows, and no loss would show it. torch asks no module whether it may be
wrapped, so layers look when they can see the wrapper:

DistributedDataParallel     in its first forward, when a layer asks for its group; also composable `replicate`
fully_shard                 when it tells a layer that its parameters are DTensors now
FullyShardedDataParallel    at all, when it wraps: layers cannot see over which ranks

Parameters that `parallelize` has replaced are marked, so that a wrapper or an optimizer that still has them
is refused, too. DTensors, which `fully_shard` makes, are known here without loading torch's module of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from tpkernels.ops.replicas import mixing_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Wrappers and optimizers that were looked at, and how many parameters they had.
accepted: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def refuse_ddp(wrapper: DistributedDataParallel) -> None:
    """Raise if a wrapper averages shards of a weight, or has parameters that were replaced. Looks once."""
    if wrapper in accepted:
        return
    if problem := _problem_of_ddp(wrapper):
        if isinstance(wrapper.module, nn.ParameterList):
            DistributedDataParallel._active_ddp_module = None  # `replicate` ends no forward that has raised
        raise ValueError(problem)
    accepted[wrapper] = len(wrapper._module_parameters)


def _problem_of_ddp(wrapper: DistributedDataParallel) -> str | None:
    for caller, name in filter(None, map(replacer_of, wrapper._module_parameters)):
        return (
            f"DistributedDataParallel has wrapped '{name}', which {caller} has replaced in the model; "
            f"call {caller} first, then wrap the model over the data-parallel group"
        )
    for name, parameter in wrapper.module.named_parameters():
        if is_shard(parameter) and name not in wrapper.parameters_to_ignore:
            holders, ranks = vars(parameter)["tensor_parallel_ranks"], ranks_of(wrapper.process_group)
            if problem := mixing_of(name, holders, ranks, type(wrapper).__name__):
                return f"{problem}. Then build the model again"  # it was sent the first rank's weights
    return None


def refuse_mesh(module: nn.Module, holders: Sequence[int], *, holds_dtensors: bool) -> None:
    """Raise if fully_shard averages a parameter of `module` over ranks that hold other shards of it.

    holders: the tensor-parallel ranks
    holds_dtensors: parameters were DTensors over these ranks before
    """
    for name, parameter in module._parameters.items():
        if is_dtensor(parameter):
            groups = list(map(ranks_of, parameter.device_mesh.get_all_groups()))
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            if holds_dtensors:  # a dimension of the mesh has the tensor-parallel ranks, others must have none
                ranks = sorted({rank for group in groups if group != tuple(holders) for rank in group})
            if problem := mixing_of(f"{type(module).__name__}.{name}", holders, ranks, "fully_shard"):
                raise ValueError(problem)


def mark_replaced(named: Iterable[tuple[str, Tensor]], caller: str) -> None:
    """Mark parameters that `caller` has replaced in their model by others."""
    accepted.clear()
    for name, parameter in named:
        vars(parameter)["replaced_by"] = caller, name


def replacer_of(parameter: Tensor) -> tuple[str, str] | None:
    """Return the function that has replaced a parameter, and its name then; None if none has."""
    found: tuple[str, str] | None = vars(parameter).get("replaced_by")
    return found


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself; detached."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return tensor.detach()


def groups_with_blocks(tensor: Tensor) -> dict[tuple[int, ...], ProcessGroup]:
    """The groups over which a DTensor is sharded, by their global ranks; none for other tensors."""
    if not is_dtensor(tensor):
        return {}
    held = zip(tensor.device_mesh.get_all_groups(), tensor.placements, strict=True)
    return {ranks_of(group): group for group, placement in held if not placement.is_replicate()}


def reshard(model: nn.Module) -> None:
    """Reshard a model under fully_shard, whose forward may have left parameters gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: then there is none
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def ranks_of(group: object) -> tuple[int, ...]:
    """Return the global ranks of a process group; none of anything else."""
    return tuple(dist.get_process_group_ranks(group)) if isinstance(group, ProcessGroup) else ()


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a shard, of which other ranks hold the rest."""
    known = vars(parameter)
    return bool(known.get("tensor_model_parallel")) and len(known.get("tensor_parallel_ranks", ())) > 1
