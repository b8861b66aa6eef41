"""The two sides of `reshard`: tensors that each rank holds and needs, whether they fit, and the plan.

All ranks gather the descriptions of all ranks, so that each finds the same errors and the same plan.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tpkernels.checkpoints.freed import free, give_memory, is_freed
from tpkernels.checkpoints.moves import (
    Block,
    BlockMessage,
    BlockMove,
    Placement,
    common,
    messages_of,
    moves_of,
    steps_of,
)
from tpkernels.checkpoints.shards import (
    Chunk,
    TensorShard,
    require_alike,
    require_one_stage,
    shards_in,
    shards_of,
)
from tpkernels.groups.state import ParallelStateError
from tpkernels.layers.world import State
from tpkernels.models.config import GPTConfig

Tensors = Mapping[str, Tensor | TensorShard]  # by name; a plain tensor is a full one, a DTensor a shard


class Renamed(NamedTuple):
    """Shards under the names of a GPT.

    chunks: by the GPT's name
    padding: views of shards that no row of the GPT fills
    """

    chunks: dict[str, list[Chunk]]
    padding: list[Tensor]


# Renames shards of another library's model. Arguments: its shards by name; the GPT's full shapes by name; the
# GPT's configuration, None if its tensors were given by name. Raises if names or shapes do not match.
NamingScheme = Callable[[Mapping[str, TensorShard], Mapping[str, tuple[int, ...]], GPTConfig | None], Renamed]


@dataclass
class Side:
    """One rank's shards of the tensors that it holds, or needs.

    shards: by the names of this side
    chunks, shapes: of this rank, and of the full tensors, by the names under which tensors move
    together: for tensors of the caller's own mapping, the ranks that together hold each full tensor
    """

    shards: dict[str, TensorShard] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    together: dict[str, tuple[int, ...]] = field(default_factory=dict)
    padding: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: nn.Module | Tensors | None, state: State, option: str) -> Side:
        """Return the side of a model or a mapping. option: the name of the argument `state`"""
        side, given = cls(), cast(object, tensors)  # callers need not be type-checked
        if given is None:
            return side
        require_one_stage(state)
        try:
            if isinstance(given, nn.Module):
                _require_known_shards(given)
                side.add(shards_of(given, state))
            elif isinstance(given, Mapping):
                shards, side.together = shards_in(given, state)
                side.add(shards)
            else:
                got = type(given).__name__
                raise TypeError(f"expected a model, a mapping of tensors by name, or None, got {got}")
        except ParallelStateError as error:
            raise ParallelStateError(f"{error}; or pass {option}=, as it was built with") from error
        for name, shard in side.shards.items():
            _require_plain(name, shard.local)
        return side

    def add(self, shards: Mapping[str, TensorShard]) -> None:
        """Add shards to move under their own names; raise if a rank would hold a row twice."""
        for name, shard in shards.items():
            chunks = list(shard.chunks())
            if any(common(one.block, other.block) for one, other in combinations(chunks, 2)):
                raise ValueError(
                    f"'{name}': expected ranges that do not overlap on a rank, got some twice; give each "
                    "copy a name of its own"
                )
            self.shards[name], self.chunks[name], self.shapes[name] = shard, chunks, tuple(shard.shape)

    def rename(self, renamed: Renamed, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Let all tensors move under the names of a GPT. shapes: of its full tensors"""
        self.chunks, self.padding = renamed
        self.shapes = {name: shapes[name] for name in self.chunks}

    def described(self) -> dict[str, ShardDescription]:
        return {
            name: ShardDescription(
                self.shapes[name],
                chunks[0].view.dtype,
                tuple(chunk.block for chunk in chunks),
                self.together.get(name),
            )
            for name, chunks in self.chunks.items()
        }

    def give_memory(self, names: Iterable[str]) -> None:
        """Give the freed ones among these tensors memory again."""
        for name in names:
            shard = self.shards.get(name)
            if shard is not None and is_freed(shard.local):
                give_memory(shard.tensor)
                self.add({name: shard})

    def free(self, names: Iterable[str]) -> None:
        """Free the memory of these tensors."""
        for name in names:
            if self.chunks.pop(name, None) is not None:  # they are views
                free(self.shards[name].tensor)

    @torch.no_grad()
    def zero_padding(self) -> None:
        for view in self.padding:
            view.zero_()
        for shard in self.shards.values():
            shard.zero_padding()

    def refuse_freed(self, why: str) -> None:
        """Raise if a tensor was freed. why: the end of the message"""
        for name, shard in self.shards.items():
            if is_freed(shard.local):
                raise ValueError(f"'{name}' was freed by a call with free_source=True, and {why}")


def _require_plain(name: str, local: Tensor) -> None:
    """Raise for tensors without plain, strided elements in memory."""
    if local.is_meta:
        raise ValueError(f"'{name}' is on the meta device; call model.to_empty(device=...) first")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"'{name}' was made in inference mode; call reshard within it, too")
    if (
        is_traceable_wrapper_subclass(cast(object, local))
        or local.layout != torch.strided
        or local.is_quantized
    ):
        raise ValueError(f"'{name}': expected plain numbers, got {type(local).__name__} {local.layout}")


def _require_known_shards(model: nn.Module) -> None:
    """Raise for models with state other than tensors, or with different tensors under one name on ranks."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"'{name}' is wrapped by FullyShardedDataParallel, whose flat parameters do not name the "
                "tensors in them; use fully_shard, or pass a full state_dict"
            )
        if getattr(module, "merged_adapters", None):
            raise ValueError(
                f"'{name}' has an adapter of peft merged into its weight, which the other model does "
                "not know; call unmerge_adapter() before, and merge_adapter() of both after"
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state and _is_more(
            module.get_extra_state()
        ):
            raise ValueError(
                f"'{name}' ({type(module).__name__}) has extra state, such as scales of fp8 "
                "(get_extra_state), which is not moved; pass a mapping of the tensors that do not need it"
            )
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            raise ValueError(
                f"'{name}' is of an expert (allreduce=False): other ranks may have other experts under this "
                "name; pass the experts' tensors under names of their own"
            )
        if any(getattr(parameter, key, None) is not None for key in ("quant_state", "SCB")):
            raise ValueError(
                f"'{name}' is quantized by bitsandbytes, whose scales are no tensors of the model; "
                "dequantize it"
            )


def _is_more(state: object) -> bool:
    return state is not None and not (isinstance(state, Tensor) and not state.numel())


def refuse_shared_memory(source: Side, target: Side, *, is_freed_later: bool) -> None:
    """Raise if a tensor to be filled shares memory with a held tensor, or with another one to be filled.

    is_freed_later: whether the source is freed
    """
    extents: list[_Extent] = []
    for side in (source, target):
        for name, chunks in side.chunks.items():
            for view, block in chunks:
                if not view.numel() or is_freed(view):
                    continue
                if side is target and _repeats(view):
                    raise ValueError(
                        f"to: several elements of '{name}' are one memory, as of an expanded tensor; "
                        "give it memory of its own"
                    )
                end = view[(-1,) * view.ndim].data_ptr() + view.element_size()
                extents.append(_Extent(view.data_ptr(), end, name, block, view, side is source))
    before: list[_Extent] = []
    for each in sorted(extents, key=lambda extent: extent.begin):
        before = [other for other in before if other.end > each.begin]
        for other in before:
            _refuse_pair(other, each, is_freed_later=is_freed_later)
        before.append(each)


class _Extent(NamedTuple):
    """From where to where in memory a rank's block of a tensor lies."""

    begin: int
    end: int
    name: str
    block: Block
    view: Tensor
    is_held: bool

    @property
    def identity(self) -> tuple[object, ...]:
        """Which block it is, in which memory, read as which numbers."""
        view = self.view
        return self.name, self.block, self.begin, view.stride(), view.dtype, view.is_conj(), view.is_neg()


def _refuse_pair(one: _Extent, other: _Extent, *, is_freed_later: bool) -> None:
    """Raise if two extents that overlap share elements, unless both are held, or one and the same block."""
    if one.is_held and other.is_held:
        return
    if one.is_held == other.is_held:
        if _share_bytes(one, other):
            raise ValueError(
                f"to: '{one.name}' and '{other.name}' are one memory, at least in part, and two tensors "
                "of the model that it is filled from; leave one of the names out"
            )
        return
    held, filled = (one, other) if one.is_held else (other, one)
    if (is_freed_later or held.identity != filled.identity) and _share_bytes(held, filled):
        raise ValueError(
            f"to: '{filled.name}' shares memory with '{held.name}' of the model that it is filled from, "
            f"{'which is freed' if is_freed_later else 'in another layout'}; give it memory of its own"
        )


def _share_bytes(one: _Extent, other: _Extent) -> bool:
    """Whether blocks whose extents overlap share a byte, by marking the bytes of one."""
    begin = min(one.begin, other.begin)
    marks = torch.zeros(max(one.end, other.end) - begin, dtype=torch.bool, device="cpu")

    def marks_of(extent: _Extent) -> Tensor:
        view, size = extent.view, extent.view.element_size()
        strides = [stride * size for stride in view.stride()]
        return marks.as_strided((*view.shape, size), (*strides, 1), extent.begin - begin)

    marks_of(one).fill_(True)
    return bool(marks_of(other).any())


def _repeats(view: Tensor) -> bool:
    """Whether elements may share memory: whether a stride is below the span of smaller strides."""
    span = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False


class ShardDescription(NamedTuple):
    """One rank's shard of a tensor, as it is sent to all ranks. together: see `Side`"""

    shape: tuple[int, ...]  # full
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    together: tuple[int, ...] | None


ByRank = list[dict[str, ShardDescription]]  # what each rank holds, or needs; replicas share one dict


class ReshardStep(NamedTuple):
    """One rank's work on some of the tensors: blocks to copy, messages to send or receive."""

    names: list[str]
    copied: list[BlockMove]
    messages: list[BlockMessage]


class ReshardPlan(NamedTuple):
    """One rank's plan of a call, and the dtypes of the source's tensors."""

    dtypes: dict[str, torch.dtype]
    steps: list[ReshardStep]


@lru_cache(maxsize=4)  # a training loop makes the same moves again
def plan_of(
    described: tuple[bytes, ...],
    machines: tuple[str, ...],
    rank: int,
    *,
    cast: bool,
    bucket_bytes: int,
    step_bytes: int | None,
) -> ReshardPlan:
    """Plan one rank's moves; raise if the models do not fit, on all ranks alike.

    described: by rank, the pickled descriptions of what it holds and what it needs
    machines: by rank
    step_bytes: the most bytes that a rank needs in a step, unless one tensor has more; None: one step
    """
    known = {each: pickle.loads(each) for each in set(described)}
    held, needed = ([known[each][side] for each in described] for side in (0, 1))
    dtypes = dtypes_of(held, needed, cast=cast)
    placements = [
        Placement(
            name,
            dtype.itemsize,
            *([own[name].blocks if name in own else () for own in side] for side in (held, needed)),
        )
        for name, dtype in dtypes.items()
    ]
    names = [[*dtypes]] if step_bytes is None else steps_of(placements, step_bytes)
    step_of = {name: number for number, some in enumerate(names) for name in some}
    moves: list[list[BlockMove]] = [[] for _ in names]
    for move in moves_of(placements, machines, rank):
        moves[step_of[move.name]].append(move)
    steps = [
        ReshardStep(
            some,
            [move for move in own if move.sender == move.receiver],
            messages_of(own, bucket_bytes, len(described)),
        )
        for some, own in zip(names, moves, strict=True)
    ]
    return ReshardPlan(dtypes, steps)


def dtypes_of(held: ByRank, needed: ByRank, *, cast: bool) -> dict[str, torch.dtype]:
    """Return the dtype of each held tensor; raise unless needed tensors and held tensors match."""
    found, wanted = _agreed("holds", held), _agreed("needs", needed)
    require_alike(found, wanted, "the models differ in tensors: in `to`", cast=cast)
    for name, mine in found.items():
        _require_castable(name, mine.dtype, wanted[name].dtype)
    for name in found:
        if len({own[name].together for own in held if name in own}) > 1:
            holders = [rank for rank, own in enumerate(held) if name in own]
            raise ValueError(
                f"'{name}': ranks {', '.join(map(str, holders))} hold plain tensors, or DTensors of several "
                "meshes, of this name, which may be shards or replicas: pass the model, DTensors, or the "
                "result of checkpoints.shards.shards_of(model)"
            )
    return {name: mine.dtype for name, mine in found.items()}


def _require_castable(name: str, held: torch.dtype, needed: torch.dtype) -> None:
    kinds_fit = held.is_floating_point and needed.is_floating_point
    if held != needed and not (kinds_fit and min(held.itemsize, needed.itemsize) > 1):
        raise ValueError(
            f"'{name}': cast=True converts between floating-point numbers of at least two bytes, got {held} "
            f"and {needed}: they need scales, or lose more than digits; convert them yourself"
        )


def _agreed(what: str, tensors: ByRank) -> dict[str, ShardDescription]:
    """Return a description of each tensor; raise if ranks differ in its full shape or dtype."""
    found: dict[str, tuple[int, ShardDescription]] = {}
    distinct = {id(own): rank for rank, own in reversed([*enumerate(tensors)])}
    for rank in sorted(distinct.values()):
        for name, mine in tensors[rank].items():
            first, other = found.setdefault(name, (rank, mine))
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"'{name}': rank {first} {what} {other.shape} of {other.dtype}, rank {rank} "
                    f"{mine.shape} of {mine.dtype}: full shapes; every rank must have the same model"
                )
    if not found:
        raise ValueError(f"expected a model on at least one rank, no rank {what} any tensor")
    return {name: mine for name, (_, mine) in found.items()}
