"""Of each tensor of the unsharded model, the part that this rank holds.

A part is one piece of the whole along one dimension, or several: of weights stacked in one (stride > 1), held
one after the other. Rows that pad a vocabulary come after the pieces, and are no part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld, tensor_world
from tpkernels.runtime.state import ParallelState, current_or_none
from tpkernels.topology.shard import VocabularySplit, ranges_of


@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor.

    local: what this rank holds, padding included
    shape: of the whole
    dim: the dimension that is split; None: every rank holds the whole
    pieces: of each rank, along `dim` of the whole
    rank: this one, in the tensor-parallel group
    """

    local: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[tuple[range, ...], ...] = ()
    rank: int = 0

    def of(self, local: Tensor) -> Part:
        """The same part of another tensor of this shape, such as an optimizer's."""
        return replace(self, local=local)

    def chunks(self, local: Tensor | None = None, rank: int | None = None) -> Iterator[Chunk]:
        """The pieces of a rank, by default our own: views of `local` without its padding."""
        local = self.local.detach() if local is None else local
        if self.dim is None:
            yield Chunk(local, (slice(None),) * local.ndim)
            return
        start = 0
        for piece in self.pieces[self.rank if rank is None else rank]:
            view = local.narrow(self.dim, start, len(piece))
            before = (slice(None),) * self.dim
            yield Chunk(view, (*before, slice(piece.start, piece.stop)))
            start += len(piece)

    def zero_padding(self) -> None:
        if self.dim is not None:
            held = sum(len(piece) for piece in self.pieces[self.rank])
            self.local.detach().narrow(self.dim, held, self.local.shape[self.dim] - held).zero_()


@dataclass(frozen=True)
class Chunk:
    """One piece.

    view: of what a rank holds
    where: in the whole: an index for its leading dimensions
    """

    view: Tensor
    where: tuple[slice, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        starts = [index.start or 0 for index in self.where]
        return (*starts, *[0] * (self.view.ndim - len(starts)))


def parts_of(model: nn.Module, state: State = None) -> dict[str, Part]:
    """Parameters and persistent buffers by name; of tied ones the first name only."""
    model = unwrapped(model)
    world = world_of(model, state)
    seen: set[int] = set()
    parts: dict[str, Part] = {}
    for prefix, owner in model.named_modules():
        own = {**owner._parameters, **owner._buffers}
        for short, tensor in own.items():
            name = f"{prefix}.{short}" if prefix else short
            if tensor is None or id(tensor) in seen or short in owner._non_persistent_buffers_set:
                continue
            seen.add(id(tensor))
            _require_plain(name, tensor)
            parts[name] = _part(name, owner, tensor, world)
    return parts


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile, whose names have no prefix."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def world_of(model: nn.Module, state: State = None) -> TensorWorld:
    """The ranks that share the model: of `state`, else those that its layers were built for."""
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
    """No pipeline: stages may give other tensors the same name."""
    found = current_or_none() if state is None else state
    if isinstance(found, ParallelState) and found.size("pp") > 1:
        raise ValueError(
            f"expected a model in one piece, got one of {found.size('pp')} pipeline stages, whose tensors "
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


def _part(name: str, owner: nn.Module, tensor: Tensor, world: TensorWorld) -> Part:
    attributes = Attributes.of(tensor)
    if not attributes.tensor_model_parallel:
        return Part(tensor, tuple(tensor.shape))
    dim = attributes.partition_dim
    if not 0 <= dim < tensor.ndim:
        raise ValueError(f"'{name}': expected a partition_dim from 0 to {tensor.ndim - 1}, got {dim}")
    ranks = range(world.size)
    split = getattr(owner, "split", None)
    pieces: tuple[tuple[range, ...], ...]
    if isinstance(split, VocabularySplit) and dim == 0:
        size = split.size
        pieces = tuple((split.ids_of(rank),) for rank in ranks)
    else:
        size = tensor.shape[dim] * world.size
        stride = attributes.partition_stride
        pieces = tuple(ranges_of(rank, size=size, ranks=world.size, stride=stride) for rank in ranks)
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    return Part(tensor, shape, dim, pieces, world.rank)
