"""The two sides of a move between layouts: what each rank holds, what it needs, and whether that fits.

What ranks tell each other is gathered by all of them. So each finds out for itself, and all alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from tpkernels.comm.transports import select
from tpkernels.comm.transports.peer_memory import Located, Trial, can_read, own_trial
from tpkernels.comm.transports.processes import machine
from tpkernels.interop.carry import Peer, block_of
from tpkernels.interop.renamed_shards import Heads, Names, listed, under_our_names
from tpkernels.interop.shards import Chunk, TensorShard, require_one_stage, shards_in, shards_of
from tpkernels.layers.world import State
from tpkernels.topology.moves import Block, Move, Placement, common

Tensors = Mapping[str, Tensor | TensorShard]  # by name; a plain tensor is a full one, a DTensor a shard


@dataclass
class Side:
    """What one rank holds, or needs, of each tensor.

    shards: by the names of this side
    tensors: by the names under which tensors move
    together: of tensors of the caller's own mapping, the ranks that have all of each, as far as it says
    """

    shards: dict[str, TensorShard] = field(default_factory=dict)
    tensors: dict[str, Part] = field(default_factory=dict)
    together: dict[str, tuple[int, ...]] = field(default_factory=dict)
    padding: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: nn.Module | Tensors | None, state: State) -> Side:
        side, given = cls(), cast(object, tensors)  # callers need not be type-checked
        if given is None:
            return side
        require_one_stage(state)
        if isinstance(given, nn.Module):
            _require_known_shards(given)
            side.add(shards_of(given, state))
        elif isinstance(given, Mapping):
            shards, side.together = shards_in(given, state)
            side.add(shards)
        else:
            got = type(given).__name__
            raise TypeError(f"expected a model, a mapping of tensors by name, or None, got {got}")
        for name, shard in side.shards.items():
            if shard.local.is_inference() and not torch.is_inference_mode_enabled():
                raise ValueError(f"'{name}' was made in inference mode; call reshard within it, too")
        return side

    def add(self, shards: Mapping[str, TensorShard]) -> None:
        """Let these move, too, under the names that they have. An error if a rank would hold a row twice."""
        for name, shard in shards.items():
            blocks = [block_of(chunk) for chunk in shard.chunks()]
            if any(common(one, other) for one, other in combinations(blocks, 2)):
                raise ValueError(
                    f"'{name}': expected ranges that do not overlap on a rank, got some twice; give each "
                    "copy a name of its own"
                )
        self.shards |= shards
        self.tensors |= {
            name: Part(shard.shape, shard.local.dtype, list(shard.chunks())) for name, shard in shards.items()
        }

    def rename(self, ours: Mapping[str, tuple[int, ...]], names: Names, heads: Heads | None) -> None:
        """Let all move under our names. ours: full shapes by name"""
        found = under_our_names(self.shards, ours, names, heads)
        self.tensors = {
            name: Part(ours[name], chunks[0].view.dtype, chunks) for name, chunks in found.chunks.items()
        }
        self.padding = found.padding

    @property
    def chunks(self) -> dict[str, Sequence[Chunk]]:
        return {name: part.chunks for name, part in self.tensors.items()}

    @property
    def places(self) -> tuple[object, ...]:
        """What says which part of which tensor lies where: all that a plan depends on."""
        found: list[object] = [*self.together.items()]
        for name, shard in self.shards.items():
            local, ranges = shard.local, tuple(map(tuple, shard.ranges))  # which callers may give as lists
            found += name, tuple(shard.shape), shard.dim, ranges, shard.rank, tuple(shard.start)
            found += local.data_ptr(), local.shape, local.stride(), local.dtype, local.device
        return tuple(found)

    @property
    def is_on_cpu(self) -> bool:
        return all(
            local.device.type == "cpu"
            and not (local.is_conj() or local.is_neg())  # whose bytes are no numbers
            for local in (shard.local for shard in self.shards.values())
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Once it is filled."""
        for view in self.padding:
            view.zero_()
        for shard in self.shards.values():
            shard.zero_padding()
            torch.autograd.graph.increment_version(shard.local)  # bytes that were read came unnoticed


def _require_known_shards(model: nn.Module) -> None:
    """Raise for shards that are under one name on all ranks, and not the same tensor."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"'{name}' is wrapped by FullyShardedDataParallel, whose flat parameters say nothing of the "
                "tensors in them; use fully_shard, or pass a full state_dict"
            )
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            raise ValueError(
                f"'{name}' is of an expert (allreduce=False): other ranks may have other experts under this "
                "name; pass the experts' tensors under names of their own"
            )


class Part(NamedTuple):
    """What one rank has of a tensor."""

    shape: tuple[int, ...]  # full
    dtype: torch.dtype
    chunks: list[Chunk]


def refuse_shared_memory(source: Side, target: Side) -> None:
    """Raise if what this rank needs would be written over what it holds, in another place."""
    held, same = {}, set()
    for name, part in source.tensors.items():
        for chunk in part.chunks:
            held[chunk.view.untyped_storage().data_ptr()] = name
            same.add((name, block_of(chunk), chunk.view.data_ptr(), chunk.view.stride()))
    filled: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, part in target.tensors.items():
        for chunk in part.chunks:
            if chunk.view.numel():
                first = filled.setdefault((chunk.view.data_ptr(), tuple(chunk.view.shape)), name)
                if first != name:
                    raise ValueError(
                        f"to: '{first}' and '{name}' are one memory, and two tensors of the model that it "
                        "is filled from; leave one of the names out"
                    )
            other = held.get(chunk.view.untyped_storage().data_ptr())
            here = name, block_of(chunk), chunk.view.data_ptr(), chunk.view.stride()
            if other is not None and chunk.view.numel() and here not in same:
                raise ValueError(
                    f"to: '{name}' shares memory with '{other}' of the model that it is filled from, in "
                    "another layout; give it memory of its own"
                )


class Told(NamedTuple):
    """What a rank tells of its part of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    located: tuple[Located, ...] = ()
    together: tuple[int, ...] | None = None  # the ranks that have all of it, if a mapping has it


class Description(NamedTuple):
    """What one rank tells all others."""

    place: str  # its machine
    trial: Trial | None  # to read the tensors that it holds; None: they are not on the CPU
    reads: bool  # whether what it needs is on the CPU
    holds: dict[str, Told]
    needs: dict[str, Told]

    @classmethod
    def of(cls, source: Side, target: Side) -> Description:
        is_here = source.is_on_cpu
        holds, needs = (
            {
                name: Told(
                    shape,
                    dtype,
                    tuple(map(block_of, chunks)),
                    tuple(Located.of(chunk.view) for chunk in chunks) if is_read else (),
                    side.together.get(name),
                )
                for name, (shape, dtype, chunks) in side.tensors.items()
            }
            for side, is_read in ((source, is_here), (target, False))
        )
        reads = target.is_on_cpu and select.requested_transport != "c10d"
        return cls(machine(), own_trial() if is_here else None, reads, holds, needs)


def dtypes_of(everybody: Sequence[Description], *, cast: bool) -> dict[str, torch.dtype]:
    """The dtype of each tensor that is held. An error unless what is needed is what is held."""
    held, needed = (
        _agreed(what, [getattr(description, what) for description in everybody])
        for what in ("holds", "needs")
    )
    missing, surplus = [name for name in needed if name not in held], [n for n in held if n not in needed]
    if missing or surplus:
        raise ValueError(
            f"the models have other tensors: `to` has besides {listed(missing)}, and lacks {listed(surplus)}"
        )
    for name, (shape, dtype) in needed.items():
        if held[name][0] != shape:
            raise ValueError(f"'{name}': expected {held[name][0]} in `to`, got {shape}: full shapes")
        if held[name][1] != dtype and not cast:
            raise ValueError(
                f"'{name}': expected {held[name][1]} in `to`, got {dtype}; pass cast=True to convert"
            )
        holders = [rank for rank, each in enumerate(everybody) if name in each.holds]
        if len({everybody[rank].holds[name].together for rank in holders}) > 1:
            raise ValueError(
                f"'{name}': ranks {', '.join(map(str, holders))} hold plain tensors, or DTensors of several "
                "meshes, of this name, which may be shards or copies: pass the model, DTensors, or what "
                "interop.shards.shards_of(model) gives"
            )
    return {name: dtype for name, (_, dtype) in held.items()}


def _agreed(what: str, tensors: Iterable[dict[str, Told]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Full shape and dtype of each tensor, which are the same on all ranks that have it."""
    found: dict[str, tuple[int, Told]] = {}
    for rank, own in enumerate(tensors):
        for name, mine in own.items():
            first, other = found.setdefault(name, (rank, mine))
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"'{name}': rank {first} {what} {other.shape} of {other.dtype}, rank {rank} "
                    f"{mine.shape} of {mine.dtype}: full shapes; every rank must have the same model"
                )
    if not found:
        raise ValueError(f"expected a model on at least one rank, no rank {what} any tensor")
    return {name: (mine.shape, mine.dtype) for name, (_, mine) in found.items()}


def placements_of(everybody: Sequence[Description], dtypes: Mapping[str, torch.dtype]) -> list[Placement]:
    """Where each tensor is and shall be."""

    def blocks(tensors: dict[str, Told], name: str) -> tuple[Block, ...]:
        return tensors[name].blocks if name in tensors else ()

    return [
        Placement(
            name,
            dtype.itemsize,
            [blocks(each.holds, name) for each in everybody],
            [blocks(each.needs, name) for each in everybody],
        )
        for name, dtype in dtypes.items()
    ]


def readable(moves: Sequence[Move], everybody: Sequence[Description], rank: int) -> dict[int, Peer]:
    """The ranks whose memory this rank reads, each tried."""
    peers = {}
    for sender in {move.sender for move in moves if move.receiver == rank != move.sender}:
        theirs = everybody[sender]
        if not everybody[rank].reads or theirs.trial is None or theirs.place != everybody[rank].place:
            continue
        if can_read(theirs.trial):
            tensors = {
                name: list(zip(held.blocks, held.located, strict=True)) for name, held in theirs.holds.items()
            }
            peers[sender] = Peer(theirs.trial.process, tensors)
    return peers
