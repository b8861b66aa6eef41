"""DTensors, as `fully_shard` and `parallelize(as_dtensor=True)` make them. Nothing here loads them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself; detached."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return tensor.detach()


def groups_with_blocks(tensor: Tensor) -> list[ProcessGroup]:
    """The groups over which a DTensor is sharded; none for other tensors."""
    if not is_dtensor(tensor):
        return []
    held = zip(tensor.device_mesh.get_all_groups(), tensor.placements, strict=True)
    return [group for group, placement in held if not placement.is_replicate()]


def reshard(model: nn.Module) -> None:
    """Reshard a model under fully_shard, whose forward may have left parameters gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: then there is none
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()
