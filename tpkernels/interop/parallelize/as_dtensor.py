"""Parameters of a parallelized model as DTensors of the unsharded parameters, for torch's own tools.

    split along dimension d     Shard(d); without the rows that pad a vocabulary
    others                      Replicate

In a module's forward its parameters are the local tensors, padded again. Backward sums partial gradients over
the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.interop.dtensor import is_chunked, over_mesh
from tpkernels.interop.parallelize.plan import ParallelizePlan, Parameters, SharedHeads, Split
from tpkernels.interop.parallelize.tokens import StandIns
from tpkernels.interop.shards import TensorShard, shard_of
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import TENSOR_DIM, State, TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region


def require_mesh(state: State) -> None:
    """Raise unless parameters can be DTensors over `state`."""
    if not isinstance(state, DeviceMesh):
        raise ValueError(
            "as_dtensor=True: expected a DeviceMesh, as in parallelize(model, mesh, ...), from the mesh that "
            f"fully_shard gets another dimension of, got {type(state).__name__}"
        )


def require_dtensors(plan: ParallelizePlan) -> None:
    """Raise unless parameters split by `plan` can be DTensors."""
    for pattern, said in plan.items():
        for entry in said if isinstance(said, tuple) else (said,):
            if isinstance(entry, Split) and entry.stacked != 1:
                raise ValueError(_refusal(f"plan: {pattern!r}", f"{entry.stacked} weights stacked in one"))
            if isinstance(entry, Split) and entry.padded:
                raise ValueError(_refusal(f"plan: {pattern!r}", "heads that are padded"))
            if isinstance(entry, Parameters | SharedHeads):
                raise ValueError(_refusal(f"plan: {pattern!r}", f"a {type(entry).__name__}"))


@torch.no_grad()
def hold_dtensors(model: nn.Module, state: State, world: TensorWorld) -> None:
    """Replace each parameter by a DTensor over the tensor-parallel dimension of `state`, a DeviceMesh."""
    assert isinstance(state, DeviceMesh)
    mesh = state if state.ndim == 1 else state[TENSOR_DIM]
    named = dict(model.named_parameters())
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in named}
    shards = {name: shard_of(name, owners[name], p, world) for name, p in named.items()}
    for name, shard in shards.items():
        if shard.dim is not None and not is_chunked(shard):
            raise ValueError(_refusal(f"'{name}'", f"{shard.ranges} of its dimension {shard.dim}"))
    made = {id(p): _dtensor(shards[name], mesh) for name, p in named.items()}
    marked = {id(p) for p in named.values() if Attributes.of(p).sequence_parallel}
    for module in list(model.modules()):
        old = {short: p for short, p in module._parameters.items() if p is not None}
        for short, parameter in old.items():
            setattr(module, short, made[id(parameter)])
        if isinstance(module, ParallelModule):
            module.holds_dtensors = True
        if old:
            summed = frozenset(short for short, p in old.items() if id(p) in marked)
            local = _LocalParameters(summed, {short: p.shape for short, p in old.items()}, world)
            StandIns(old, local).put_on(module, first=True)


def _dtensor(shard: TensorShard, mesh: DeviceMesh) -> nn.Parameter:
    parameter = nn.Parameter(over_mesh(shard, mesh), requires_grad=shard.tensor.requires_grad)
    # backward sums it: finalize_gradients must not
    replace(Attributes.of(shard.tensor), sequence_parallel=False).put_on(parameter)
    return parameter


def _refusal(what: str, how: str) -> str:
    return (
        f"as_dtensor=True: {what}: expected weights with one range of rows or columns on each rank, as "
        f"DTensor's Shard, got {how}; leave as_dtensor out: tpkernels' clip_grad_norm_, dcp and "
        "full_state_dict take the model as it is, under fully_shard, too"
    )


class _LocalParameters:
    """Returns the local tensor that replaces a module's DTensor in its forward.

    summed: names of parameters marked `sequence_parallel`: their gradients are partial
    shapes: of the local tensors, padding included
    """

    def __init__(self, summed: frozenset[str], shapes: Mapping[str, torch.Size], world: TensorWorld) -> None:
        self.summed = summed
        self.shapes = shapes
        self.world = world

    def __call__(self, module: nn.Module, name: str) -> Tensor:
        parameter: Tensor | None = module._parameters[name]
        if not isinstance(parameter, DTensor):
            raise TypeError(f"'{name}': expected a DTensor, as parallelize made it, got {type(parameter)}")
        local: Tensor = parameter.to_local()
        if name in self.summed:
            local = copy_to_region(local.reshape(-1), self.world.group).view(local.shape)
        shape = self.shapes[name]
        if local.shape[:1] != shape[:1]:
            local = F.pad(local, (*[0, 0] * (local.ndim - 1), 0, shape[0] - local.shape[0]))
        return local
