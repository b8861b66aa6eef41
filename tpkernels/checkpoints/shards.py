"""This rank's shard of each tensor of the unsharded model.

A tensor-parallel shard is one or more ranges of the full tensor along one dimension, concatenated: several if
the tensor is a concatenation of weights (stride > 1). Padding of a vocabulary or of heads follows the ranges;
the full tensor has no padding. Under `fully_shard` a rank holds a block of its tensor-parallel shard.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from tpkernels.checkpoints.moves import Block
from tpkernels.groups.sizes import HeadSplit, VocabularySplit, ranges_of, stacked_ranges
from tpkernels.groups.state import ParallelState, current_or_none
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld, tensor_world
from tpkernels.layers.wrappers import local_of, reshard


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of one tensor of the unsharded model.

    tensor: the model's own, padding included; under `fully_shard` a DTensor
    shape: of the full tensor
    dim: the dimension that tensor-parallel ranks split; None: the tensor is replicated, or a DTensor of the
        full shape
    ranges: of each tensor-parallel rank, along `dim` of the full tensor
    rank: this rank in the tensor-parallel group
    start: where this rank's block begins in the tensor-parallel shard, or in the full tensor if dim is None
    """

    tensor: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[range, ...], ...] = ()
    rank: int = 0
    start: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def local(self) -> Tensor:
        """This rank's shard as a plain tensor that shares memory with the model."""
        return local_of(self.tensor)

    def of(self, tensor: Tensor) -> TensorShard:
        """Return the same shard of another tensor of this shape, such as an optimizer's."""
        return replace(self, tensor=tensor)

    def gathered(self) -> TensorShard:
        """Gather this rank's tensor-parallel shard from its blocks. Called by all ranks of its mesh."""
        if not isinstance(self.tensor, DTensor):
            return self
        with torch.no_grad():
            return replace(self, tensor=self.tensor.full_tensor(), start=(0,) * len(self.shape))

    def chunks(self, local: Tensor | None = None, rank: int | None = None) -> Iterator[Chunk]:
        """Yield a rank's, by default this rank's, chunks of the full tensor as views of `local`."""
        local = self.local if local is None else local
        block = tuple((start, start + size) for start, size in zip(self.start, local.shape, strict=True))
        if self.dim is None:
            yield Chunk(local, block)
            return
        dim, full = self.dim, self.shape[self.dim]
        (begin, end), offset, found = block[dim], 0, []
        for each in self.ranges[self.rank if rank is None else rank]:
            low, high = max(begin, offset), min(end, offset + len(each))
            if low < high:
                found.append((low, each.start + low - offset, each.start + high - offset))
            offset += len(each)
        for low, first, last in found or [(begin, full, full)]:  # padding only: no elements, past the end
            view = local.narrow(dim, low - begin, last - first)
            yield Chunk(view, (*block[:dim], (first, last), *block[dim + 1 :]))

    def zero_padding(self) -> None:
        """Set the padding of this rank's shard to zero."""
        if self.dim is not None:
            held = sum(len(each) for each in self.ranges[self.rank])
            size = self.local.shape[self.dim]
            first = min(max(held - self.start[self.dim], 0), size)
            self.local.narrow(self.dim, first, size - first).zero_()


class Chunk(NamedTuple):
    """One range of a shard: a view of the shard, and its block of the full tensor."""

    view: Tensor
    block: Block

    @property
    def where(self) -> tuple[slice, ...]:
        """The block as an index of the full tensor."""
        return tuple(slice(*ends) for ends in self.block)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first index of the block, by dimension."""
        return tuple(begin for begin, _ in self.block)


def shards_of(model: nn.Module, state: State = None) -> dict[str, TensorShard]:
    """Return the shards of parameters and persistent buffers by name; tied tensors have their first name."""
    model = unwrapped(model)
    reshard(model)
    if state is None and current_or_none() is None and not _is_split(model):
        world = TensorWorld(0, 1, None)  # all of its tensors are full
    else:
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
            if tensor.is_meta:
                raise ValueError(f"'{name}' is on the meta device; call model.to_empty(device=...) first")
            shards[name] = shard_of(name, owner, tensor, world)
    return shards


def _is_split(model: nn.Module) -> bool:
    """Whether a model has tensor-parallel layers, or parameters with Megatron's marks of shards."""
    return any(isinstance(module, ParallelModule) for module in model.modules()) or any(
        Attributes.of(parameter).tensor_model_parallel for parameter in model.parameters()
    )


def shards_in(
    tensors: Mapping[str, Tensor | TensorShard], state: State = None
) -> tuple[dict[str, TensorShard], dict[str, tuple[int, ...]]]:
    """Return the shards of tensors by name, and by name the ranks that together hold each full tensor.

    A plain tensor counts as full, a DTensor as sharded over its mesh. A tensor with Megatron's attributes is
    a shard of the tensor-parallel ranks of `state`, and has no entry in the second result.
    """
    shards: dict[str, TensorShard] = {}
    together: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorShard):
            shards[name] = tensor
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"'{name}': expected a tensor or a TensorShard, got {type(tensor).__name__}")
        attributes = Attributes.of(tensor)
        if attributes.tensor_model_parallel and attributes.partition_stride > 1:
            raise ValueError(
                f"'{name}': has {attributes.partition_stride} weights in one, whose sizes its layer knows, "
                "and a mapping does not; pass the model, or the result of checkpoints.shards.shards_of(model)"
            )
        if attributes.tensor_model_parallel:
            shards[name] = shard_of(name, nn.Module(), tensor, tensor_world(state))
            continue
        if not isinstance(tensor, DTensor):
            together[name] = (dist.get_rank(),)
        else:
            together[name] = tuple(tensor.device_mesh.mesh.flatten().tolist())
        shards[name] = TensorShard(tensor, tuple(tensor.shape), start=_start_of(name, tensor))
    return shards, together


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile, which prefix names."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def some_names(names: Sequence[str], most: int = 4) -> str:
    """Format some of the names, for errors."""
    if not names:
        return "nothing"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{list(names[:most])}{more}"


class Described(Protocol):
    """A tensor, or a description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


def require_alike(
    model: Mapping[str, Described],
    given: Mapping[str, Described],
    problem: str,
    *,
    cast: bool | None = None,
    aliases: Container[str] = (),
) -> None:
    """Raise unless tensors have the names, full shapes and dtypes of the model's.

    problem: the beginning of the message about other names
    cast: whether other dtypes are allowed; None: not, and the caller has no such option
    aliases: names that may be given as well
    """
    missing = [name for name in model if name not in given]
    surplus = [name for name in given if name not in model and name not in aliases]
    if missing or surplus:
        raise ValueError(
            f"{problem} missing are {some_names(missing)}, not in the model are {some_names(surplus)}"
        )
    for name, expected in model.items():
        found = given[name]
        if tuple(found.shape) != tuple(expected.shape):
            raise ValueError(
                f"'{name}': expected {tuple(expected.shape)}, got {tuple(found.shape)}: full shapes"
            )
        if found.dtype != expected.dtype and not cast:
            advice = "" if cast is None else "; pass cast=True to convert"
            raise ValueError(f"'{name}': expected {expected.dtype}, got {found.dtype}{advice}")


def world_of(model: nn.Module, state: State = None) -> TensorWorld:
    """Return the tensor-parallel world of `state`, by default the world of the model's layers."""
    worlds = [
        (name, module.world) for name, module in model.named_modules() if isinstance(module, ParallelModule)
    ]
    world = worlds[0][1] if worlds and state is None else tensor_world(state)
    for name, other in worlds:
        if (other.rank, other.size) != (world.rank, world.size):
            raise ValueError(
                f"'{name}' was built as {other}, but in the tensor-parallel group this is {world}; pass the "
                "state that the model was built with"
            )
    return world


def require_one_stage(state: State = None) -> None:
    """Refuse pipelines: stages may use one name for different tensors."""
    found = current_or_none() if state is None else state
    if isinstance(found, ParallelState):
        stages = found.size("pp")
    else:  # an object with groups, as Megatron's ProcessGroupCollection
        pipeline = getattr(found, "pp", None)
        stages = 1 if pipeline is None else pipeline.size()
    if stages > 1:
        raise ValueError(
            f"expected a model in one piece, got one of {stages} pipeline stages, whose tensors "
            "may have the same names; save each stage's state_dict by itself"
        )


def shard_of(name: str, owner: nn.Module, tensor: Tensor, world: TensorWorld) -> TensorShard:
    """Return the shard of one tensor of the module `owner`."""
    attributes = Attributes.of(tensor)
    start = _start_of(name, tensor)
    if not attributes.tensor_model_parallel or getattr(owner, "holds_dtensors", False):
        return TensorShard(tensor, tuple(tensor.shape), start=start)
    dim = attributes.partition_dim
    if not 0 <= dim < tensor.ndim:
        raise ValueError(f"'{name}': expected a partition_dim from 0 to {tensor.ndim - 1}, got {dim}")
    split = getattr(owner, "split", None)
    if isinstance(split, VocabularySplit) and dim == 0:
        size = split.size
        ranges: tuple[tuple[range, ...], ...] = tuple((split.ids_of(rank),) for rank in range(world.size))
    elif isinstance(split, HeadSplit):
        size = split.size
        ranges = tuple((split.features_of(rank),) for rank in range(world.size))
    elif stacks := getattr(owner, "stacks", ()):
        size = sum(stacks)
        ranges = tuple(stacked_ranges(rank, stacks, world.size) for rank in range(world.size))
    else:
        size, stride = tensor.shape[dim] * world.size, attributes.partition_stride
        held = partial(ranges_of, size=size, ranks=world.size, stride=stride)
        ranges = tuple(held(rank) for rank in range(world.size))
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    return TensorShard(tensor, shape, dim, ranges, world.rank, start)


def _start_of(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the first index of this rank's block in a DTensor; zeros for other tensors."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"'{name}': expected a DTensor that is sharded or replicated, got {tensor.placements}; "
            "redistribute it first"
        )
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return start
