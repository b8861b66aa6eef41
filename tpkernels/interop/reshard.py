"""Moves the weights of a live model to ranks that split them in another way: no files, no full tensors.

    reshard(trainer, to=generator)

Each rank describes the blocks that it holds and those that it needs, all ranks gather these descriptions, and
each finds the same plan by arithmetic (`topology.moves`), which `carry` carries out. A model that does not
fit is refused on all ranks before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tpkernels.comm.transports import select
from tpkernels.comm.transports.peer_memory import Located, Trial, can_read, own_trial
from tpkernels.comm.transports.processes import machine
from tpkernels.interop.carry import Peer, block_of, copy_own, exchange, read_from_peers
from tpkernels.interop.optimizer_state import GROUPS, Described, OptimizerState
from tpkernels.interop.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.interop.shards import Chunk, TensorShard, require_one_stage, shards_in, shards_of
from tpkernels.layers.world import State
from tpkernels.runtime import c10d
from tpkernels.topology.moves import Block, Move, Placement, moves_of

Tensors = Mapping[str, Tensor | TensorShard]  # by name; a plain tensor is a full one, a DTensor a shard
T = TypeVar("T")
BUCKET_BYTES, BUCKETS = 32 * 2**20, 4


class Moved(NamedTuple):
    """What one rank did, in bytes and messages."""

    copied: int = 0  # of what it held itself
    read: int = 0  # out of the memory of other processes
    received: int = 0
    sent: int = 0
    messages: int = 0


def reshard(
    model_or_state: nn.Module | Tensors | None,
    *,
    to: nn.Module | Tensors | None,
    optimizer: Optimizer | None = None,
    to_optimizer: Optimizer | None = None,
    cast: bool = False,
    state: State = None,
    to_state: State = None,
    bucket_bytes: int = BUCKET_BYTES,
    buckets: int = BUCKETS,
) -> Moved:
    """Fill `to` with the weights of `model_or_state`, which other ranks may hold, and hold in another way.

    Called by all ranks of the world. Parameters and persistent buffers move; padding of `to` becomes zero.

    model_or_state: None on a rank that has none
    to: None on a rank that needs none
    optimizer, to_optimizer: whose state and options move, too; of the models
    cast: convert tensors of another dtype
    state, to_state: as the models were built with; by default found in their layers
    bucket_bytes, buckets: a rank has at most so many messages of so many bytes in flight, and takes no more
        memory than these
    """
    with raise_on_all_ranks(f"reshard(cast={cast}, bucket_bytes={bucket_bytes}, buckets={buckets})"):
        if min(bucket_bytes, buckets) < 1:
            raise ValueError(f"expected at least one bucket of one byte, got {buckets} of {bucket_bytes}")
        source, target = _side(model_or_state, state), _side(to, to_state)
        held = {} if optimizer is None else OptimizerState(optimizer, source.shards).content()
        resumed = None if to_optimizer is None else OptimizerState(to_optimizer, target.shards)
        told = _OptimizerTold(held.pop(GROUPS, None), _told(held), resumed is not None)
    told_by_all = _gathered(told)
    with raise_on_all_ranks("reshard"):
        groups, entries = _optimizer_told(told_by_all)
        placed = {} if resumed is None else _placed(resumed, groups, entries)
        source, target = source.beside(held), target.beside(placed)
        _refuse_shared_memory(source, target)
        own = _description(source, target)
    everybody = _gathered(own)
    with raise_on_all_ranks("reshard"):
        dtypes = _compared(everybody, cast=cast)
        moves = moves_of(_placements(everybody, dtypes), [described.place for described in everybody])
        peers = _readable(moves, everybody)
    can_be_read = _gathered(frozenset(peers))
    sources, targets = source.chunks, target.chunks
    rank, group = dist.get_rank(), c10d.default_group()
    by_message = [
        move
        for move in moves
        if move.sender != move.receiver and move.sender not in can_be_read[move.receiver]
    ]
    by_reading = [move for move in moves if move.receiver == rank and move.sender in peers]
    with raise_on_all_ranks("reshard"):
        copy_own(moves, rank, sources, targets)
        read_from_peers(by_reading, peers, targets, dtypes, bucket_bytes * buckets)
    messages = 0
    if by_message:  # the same on all ranks
        messages = exchange(
            by_message, group, sources, targets, dtypes, bucket_bytes=bucket_bytes, buckets=buckets
        )
    with raise_on_all_ranks("reshard"):  # until then nobody changes what others may read
        target.finish()
        if resumed is not None:
            resumed.take(groups, entries | placed)
    return Moved(
        sum(move.size for move in moves if move.sender == move.receiver == rank),
        sum(move.size for move in by_reading),
        sum(move.size for move in by_message if move.receiver == rank),
        sum(move.size for move in by_message if move.sender == rank),
        messages,
    )


@dataclass
class _Side:
    """What one rank holds, or needs, by name."""

    shards: dict[str, TensorShard] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()  # of the caller's own mapping: said to be full
    chunks: dict[str, list[Chunk]] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = {
            name: [chunk for chunk in shard.chunks() if chunk.view.numel()]
            for name, shard in self.shards.items()
        }

    def beside(self, entries: Mapping[str, object]) -> _Side:
        """With those of an optimizer's entries that are shards."""
        shards = {name: value for name, value in entries.items() if isinstance(value, TensorShard)}
        return _Side(self.shards | shards, self.plain) if shards else self

    def finish(self) -> None:
        for shard in self.shards.values():
            shard.zero_padding()
            torch.autograd.graph.increment_version(shard.local)  # another process's bytes came unnoticed


def _side(given: nn.Module | Tensors | None, state: State) -> _Side:
    if given is None:
        return _Side()
    require_one_stage(state)
    if isinstance(given, nn.Module):
        return _Side(shards_of(given, state))
    if not isinstance(given, Mapping):
        raise TypeError(
            f"expected a model, a mapping of tensors by name, or None, got {type(given).__name__}"
        )
    return _Side(*shards_in(given, state))


class _OptimizerTold(NamedTuple):
    """What one rank tells all others of its optimizers."""

    groups: list[dict[str, Any]] | None  # of the one whose state moves; None: it has none
    entries: dict[str, Any]  # tensors as `Described`, numbers as they are
    is_resumed: bool  # whether it has one that takes the state


def _told(content: Mapping[str, Any]) -> dict[str, Any]:
    told = {}
    for name, value in content.items():
        if isinstance(value, TensorShard):
            value = Described(value.shape, value.local.dtype)
        told[name] = value.cpu() if isinstance(value, Tensor) else value
    return told


def _optimizer_told(everybody: Sequence[_OptimizerTold]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups and entries of the optimizer whose state moves; each by the first rank that has it."""
    entries = {name: value for told in reversed(everybody) for name, value in told.entries.items()}
    groups = next((told.groups for told in everybody if told.groups is not None), None)
    if (groups is not None) != any(told.is_resumed for told in everybody):
        missing = "optimizer" if groups is None else "to_optimizer"
        raise ValueError(
            f"{missing}: expected one on at least one rank, as there is its counterpart, got none"
        )
    return groups or [], entries


def _placed(
    resumed: OptimizerState, groups: list[dict[str, Any]], entries: Mapping[str, Any]
) -> dict[str, TensorShard | Tensor | None]:
    """New tensors of an optimizer's state; numbers that are tensors have their values."""
    resumed.require_groups(groups)
    described = {
        name: Described(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for name, value in entries.items()
        if isinstance(value, Tensor | Described)
    }
    placed = resumed.place_for(described)
    for name, tensor in placed.items():
        if isinstance(tensor, Tensor):
            tensor.copy_(entries[name])
    return placed


def _refuse_shared_memory(source: _Side, target: _Side) -> None:
    """Raise if what this rank needs would be written over what it holds, in another place."""
    held, same = {}, set()
    for name, chunks in source.chunks.items():
        for chunk in chunks:
            held[chunk.view.untyped_storage().data_ptr()] = name
            same.add((name, block_of(chunk), chunk.view.data_ptr(), chunk.view.stride()))
    for name, chunks in target.chunks.items():
        for chunk in chunks:
            other = held.get(chunk.view.untyped_storage().data_ptr())
            here = name, block_of(chunk), chunk.view.data_ptr(), chunk.view.stride()
            if other is not None and here not in same:
                raise ValueError(
                    f"to: '{name}' shares memory with '{other}' of the model that it is filled from, in "
                    "another layout; give it memory of its own"
                )


class _Held(NamedTuple):
    """A tensor of which a rank has blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    located: tuple[Located, ...] = ()
    is_plain: bool = False


class _Description(NamedTuple):
    """What one rank tells all others."""

    place: str  # its machine
    trial: Trial | None  # to read the tensors that it holds; None: they are not on the CPU
    reads: bool  # whether what it needs is on the CPU
    holds: dict[str, _Held]
    needs: dict[str, _Held]


def _description(source: _Side, target: _Side) -> _Description:
    is_here = _is_on_cpu(source)
    holds = {
        name: _Held(
            shard.shape,
            shard.local.dtype,
            tuple(map(block_of, source.chunks[name])),
            tuple(Located.of(chunk.view) for chunk in source.chunks[name]) if is_here else (),
            name in source.plain,
        )
        for name, shard in source.shards.items()
    }
    needs = {
        name: _Held(shard.shape, shard.local.dtype, tuple(map(block_of, target.chunks[name])))
        for name, shard in target.shards.items()
    }
    reads = _is_on_cpu(target) and select.requested_transport != "c10d"
    return _Description(machine(), own_trial() if is_here else None, reads, holds, needs)


def _is_on_cpu(side: _Side) -> bool:
    return all(shard.local.device.type == "cpu" for shard in side.shards.values())


def _gathered(own: T) -> list[T]:
    everybody: list[T] = [own] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(everybody, own)
    return everybody


def _compared(everybody: Sequence[_Description], *, cast: bool) -> dict[str, torch.dtype]:
    """The dtype of each tensor that is held. An error, the same on all ranks, unless it all fits."""
    held, needed = (_agreed(what, everybody) for what in ("holds", "needs"))
    missing, surplus = [name for name in needed if name not in held], [n for n in held if n not in needed]
    if missing or surplus:
        raise ValueError(
            f"the models have other tensors: `to` has besides {missing or 'nothing'}, and lacks "
            f"{surplus or 'nothing'}"
        )
    for name, (shape, dtype) in needed.items():
        if held[name][0] != shape:
            raise ValueError(f"'{name}': expected {held[name][0]} in `to`, got {shape}: full shapes")
        if held[name][1] != dtype and not cast:
            raise ValueError(
                f"'{name}': expected {held[name][1]} in `to`, got {dtype}; pass cast=True to convert"
            )
        holders = [rank for rank, each in enumerate(everybody) if name in each.holds]
        if len(holders) > 1 and any(everybody[rank].holds[name].is_plain for rank in holders):
            raise ValueError(
                f"'{name}': ranks {', '.join(map(str, holders))} hold plain tensors of this name, which may "
                "be shards or copies: pass the model, DTensors, or what interop.shards.shards_of(model) gives"
            )
    return {name: dtype for name, (_, dtype) in held.items()}


def _agreed(what: str, everybody: Sequence[_Description]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Full shape and dtype of each tensor, which are the same on all ranks that have it."""
    found: dict[str, tuple[int, _Held]] = {}
    for rank, description in enumerate(everybody):
        tensors: dict[str, _Held] = getattr(description, what)
        for name, mine in tensors.items():
            first, other = found.setdefault(name, (rank, mine))
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"'{name}': rank {first} {what} {other.shape} of {other.dtype}, rank {rank} "
                    f"{mine.shape} of {mine.dtype}: full shapes; every rank must have the same model"
                )
    if not found:
        raise ValueError(f"expected a model on at least one rank, no rank {what} any tensor")
    return {name: (mine.shape, mine.dtype) for name, (_, mine) in found.items()}


def _placements(everybody: Sequence[_Description], dtypes: Mapping[str, torch.dtype]) -> list[Placement]:
    def blocks(tensors: dict[str, _Held], name: str) -> tuple[Block, ...]:
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


def _readable(moves: Sequence[Move], everybody: Sequence[_Description]) -> dict[int, Peer]:
    """The ranks whose memory this rank reads, each tried."""
    rank = dist.get_rank()
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
