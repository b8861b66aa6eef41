"""The shard that this rank holds of each tensor of the unsharded model.

A shard is one or more ranges of the full tensor along one dimension, concatenated: several if the tensor is a
concatenation of weights (stride > 1). Rows that pad a vocabulary follow the ranges; the full tensor has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld, tensor_world
from tpkernels.runtime.state import ParallelState, current_or_none
from tpkernels.topology.shard import VocabularySplit, ranges_of


@dataclass(frozen=True)
class TensorShard:
    """One tensor on this rank.

    local: the shard, padding included
    shape: of the full tensor
    dim: the dimension that is split; None: the tensor is replicated
    ranges: of each rank, along `dim` of the full tensor
    rank: this rank in the tensor-parallel group
    """

    local: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[range, ...], ...] = ()
    rank: int = 0

    def of(self, local: Tensor) -> TensorShard:
        """The same ranges of another tensor of this shape, such as an optimizer's."""
        return replace(self, local=local)

    def chunks(self, local: Tensor | None = None, rank: int | None = None) -> Iterator[Chunk]:
        """The ranges of a rank, by default this one, as views of `local`."""
        local = self.local.detach() if local is None else local
        if self.dim is None:
            yield Chunk(local, (slice(None),) * local.ndim)
            return
        start = 0
        before = (slice(None),) * self.dim
        for each in self.ranges[self.rank if rank is None else rank]:
            view = local.narrow(self.dim, start, len(each))
            yield Chunk(view, (*before, slice(each.start, each.stop)))
            start += len(each)

    def zero_padding(self) -> None:
        if self.dim is not None:
            held = sum(len(each) for each in self.ranges[self.rank])
            self.local.detach().narrow(self.dim, held, self.local.shape[self.dim] - held).zero_()


@dataclass(frozen=True)
class Chunk:
    """One range.

    view: of a shard
    where: index of the full tensor's leading dimensions
    """

    view: Tensor
    where: tuple[slice, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        starts = [index.start or 0 for index in self.where]
        return (*starts, *[0] * (self.view.ndim - len(starts)))


def shards_of(model: nn.Module, state: State = None) -> dict[str, TensorShard]:
    """Parameters and persistent buffers by name; a tied tensor has its first name only."""
    model = unwrapped(model)
    world = world_of(model, state)
    seen: set[int] = set()
    shards: dict[str, TensorShard] = {}
    for prefix, owner in model.named_modules():
        own = {**owner._parameters, **owner._buffers}
        for short, tensor in own.items():
            name = f"{prefix}.{short}" if prefix else short
            if tensor is None or id(tensor) in seen or short in owner._non_persistent_buffers_set:
                continue
            seen.add(id(tensor))
            _require_plain(name, tensor)
            shards[name] = _shard(name, owner, tensor, world)
    return shards


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile, which prefix names."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def world_of(model: nn.Module, state: State = None) -> TensorWorld:
    """The tensor-parallel ranks of `state`; by default those that the model's layers were built for."""
    worlds = [
        (name, module.world) for name, module in model.named_modules() if isinstance(module, ParallelModule)
    ]
    world = worlds[0][1] if worlds and state is None else tensor_world(state)
    for name, other in worlds:
        if (other.rank, other.size) != (world.rank, world.size):
            raise ValueError(
                f"'{name}' was built as {other}, but the tensor-parallel group is one where this is {world}; "
                "pass the state that the model was built with"
            )
    return world


def require_one_stage(state: State = None) -> None:
    """Refuse pipelines: stages may use one name for different tensors."""
    found = current_or_none() if state is None else state
    if isinstance(found, ParallelState):
        stages = found.size("pp")
    else:  # what holds groups, as Megatron's ProcessGroupCollection
        pipeline = getattr(found, "pp", None)
        stages = 1 if pipeline is None else pipeline.size()
    if stages > 1:
        raise ValueError(
            f"expected a model in one piece, got one of {stages} pipeline stages, whose tensors "
            "may have the same names; save each stage's state_dict by itself"
        )


def _require_plain(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"'{name}': expected a plain tensor, got a DTensor: a model under fully_shard cannot be saved or "
            "loaded here, and torch.distributed.checkpoint alone would mix up tensor-parallel ranks; use "
            "GradientBuckets or DDP, or save before fully_shard"
        )
    if tensor.is_meta:
        raise ValueError(f"'{name}' is on the meta device; call model.to_empty(device=...) first")


def _shard(name: str, owner: nn.Module, tensor: Tensor, world: TensorWorld) -> TensorShard:
    attributes = Attributes.of(tensor)
    if not attributes.tensor_model_parallel:
        return TensorShard(tensor, tuple(tensor.shape))
    dim = attributes.partition_dim
    if not 0 <= dim < tensor.ndim:
        raise ValueError(f"'{name}': expected a partition_dim from 0 to {tensor.ndim - 1}, got {dim}")
    split = getattr(owner, "split", None)
    if isinstance(split, VocabularySplit) and dim == 0:
        size = split.size
        ranges: tuple[tuple[range, ...], ...] = tuple((split.ids_of(rank),) for rank in range(world.size))
    else:
        size, stride = tensor.shape[dim] * world.size, attributes.partition_stride
        held = partial(ranges_of, size=size, ranks=world.size, stride=stride)
        ranges = tuple(held(rank) for rank in range(world.size))
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    return TensorShard(tensor, shape, dim, ranges, world.rank)
