"""Moves the weights of a live model to another sharding, without files or full tensors.

    reshard(trainer, to=generator)

Each rank describes the blocks that it holds and needs, all ranks gather these descriptions, and each computes
the same plan (`topology.moves`), which `carry` carries out. A model that does not fit is refused on all ranks
before anything is sent. Later calls reuse the plan while no rank's tensors have moved in memory.

With free_source the model moves in steps: a few tensors of `to` get memory and are filled, and when all ranks
have their blocks of these tensors, the source's are freed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tpkernels.checkpoints.moves import BlockMessage, BlockMove, messages_of, moves_of, steps_of
from tpkernels.checkpoints.optimizer_state import GROUPS, Described, OptimizerState
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.checkpoints.reshard_plan import (
    Description,
    Side,
    Tensors,
    dtypes_of,
    held_and_needed,
    placements_of,
    readable,
    refuse_freed,
    refuse_shared_memory,
)
from tpkernels.checkpoints.reshard_transfer import (
    Reads,
    copy_own,
    exchange,
    freed_like,
    leave_meta_device,
    read_from_peers,
    refuse_shared,
)
from tpkernels.checkpoints.shards import TensorShard, unwrapped
from tpkernels.comm.agreement import bytes_of_all
from tpkernels.comm.transports import select
from tpkernels.groups import c10d
from tpkernels.interop.renamed_shards import Heads, NamingScheme
from tpkernels.layers.world import State
from tpkernels.models.gpt import GPT

T = TypeVar("T")


class Resharded(NamedTuple):
    """The bytes that one rank moved, and its messages."""

    copied: int = 0  # from its own tensors
    read: int = 0  # out of the memory of other processes
    received: int = 0
    sent: int = 0
    messages: int = 0


def reshard(
    model_or_state: nn.Module | Tensors | None,
    *,
    to: nn.Module | Tensors | None,
    names: NamingScheme = "own",
    optimizer: Optimizer | None = None,
    to_optimizer: Optimizer | None = None,
    cast: bool = False,
    free_source: bool = False,
    state: State = None,
    to_state: State = None,
    bucket_bytes: int = 32 * 2**20,
    buckets: int = 4,
) -> Resharded:
    """Fill `to` with the weights of `model_or_state`, which may have another sharding or other ranks.

    Called by all ranks of the world. Parameters and persistent buffers move; padding of `to` becomes zero.
    After an error `model_or_state` is unchanged, except with free_source, and `to` may be partly filled.

    model_or_state: None on a rank without weights
    to: None on a rank that needs no weights; a model that is on the meta device, or was freed, gets memory
        while it is filled
    names: of `to`: the same as of `model_or_state`, or for a GPT those of Hugging Face's or Megatron's model
    optimizer, to_optimizer: the models' optimizers; their state and options move, too
    cast: convert tensors of another floating-point dtype
    free_source: free the model's parameters, and its optimizer's state, once they have moved
    state, to_state: as the models were built with; by default found in their layers
    bucket_bytes, buckets: a rank has at most `buckets` messages of `bucket_bytes` in flight, and takes no
        more memory than these
    """
    request = (
        f"reshard(names={names!r}, cast={cast}, free_source={free_source}, bucket_bytes={bucket_bytes}, "
        f"buckets={buckets})"
    )
    with raise_on_all_ranks(request):
        if min(bucket_bytes, buckets) < 1:
            raise ValueError(f"expected at least one bucket of one byte, got {buckets} of {bucket_bytes}")
        if names not in get_args(NamingScheme):
            raise ValueError(f"names: expected one of {', '.join(get_args(NamingScheme))}, got {names!r}")
        source = Side.of(model_or_state, state)
        refuse_freed(source.shards, "has no numbers; move those of the model that it was moved to")
        if isinstance(to, nn.Module) and source.shards:
            leave_meta_device(unwrapped(to), next(iter(source.shards.values())).local.device)
        target = Side.of(to, to_state)
        if names != "own":
            refuse_freed(target.shards, f"gets memory only where names='own', not {names!r}")
        kept = {} if optimizer is None else OptimizerState(optimizer, source.shards).content()
        resumed = None if to_optimizer is None else OptimizerState(to_optimizer, target.shards)
        refuse_freed(_shards_in(kept), "has no numbers; the optimizer's state has moved without this one")
        if free_source:
            _require_freeable(model_or_state, source, kept)
        told = _CallDescription(
            {name: shard.shape for name, shard in source.shards.items()},
            _heads(model_or_state),
            kept.pop(GROUPS, None),
            _described(kept),
            resumed is not None,
        )
        options = names, cast, free_source, bucket_bytes, buckets, select.requested_transport, told.heads
        has_optimizer = optimizer is not None or to_optimizer is not None  # whose states are new tensors
        places = None if has_optimizer else (options, source.places, target.places)
        group = c10d.default_group()
        plans = _plans_of.setdefault(group, _KnownPlans())
        plan = plans.known.get(places)
    states = _MovingState([], {}, {})
    numbers = {*_gathered(0 if plan is None else plan.number)}
    if plan is None or len(numbers) > 1:  # the same on all ranks
        plan, states = _planned(
            *(plans.next_number(), told, source, target, kept, resumed, names, cast, free_source),
            *(bucket_bytes, buckets),
        )
        if places is not None:
            plans.keep(places, plan)
    elif plan.renaming is not None:
        target.rename(*plan.renaming)
    with _told_if_halved(free_source):
        for step in plan.steps:
            with raise_on_all_ranks("reshard: copies"):  # at its end all have read: what they read may change
                target.give_memory(step.names)
                sources, targets = source.chunks, target.chunks
                copy_own(step.copied, sources, targets)
                read_from_peers(step.reads, targets, bucket_bytes * buckets)
            if step.is_sent:
                with raise_on_all_ranks("reshard: messages"):
                    exchange("messages", step.messages, buckets, group, sources, targets, plan.dtypes)
            if free_source:
                del sources
                source.free(step.names)
        target.finish()
    if resumed is not None:
        resumed.take(states.groups, states.entries | states.placed)
    return _done(plan, dist.get_rank())


def _require_freeable(given: object, source: Side, kept: Mapping[str, Any]) -> None:
    if given is not None and not isinstance(given, nn.Module):
        raise TypeError(
            f"free_source: expected a model, got {type(given).__name__}: others may hold the tensors in it"
        )
    shards = source.shards | _shards_in(kept)
    refuse_shared([(name, shard.tensor) for name, shard in shards.items()])
    for shard in shards.values():  # here, where an error is every rank's
        if shard.local.is_floating_point():
            freed_like(shard.local)


@contextmanager
def _told_if_halved(is_freed: bool) -> Iterator[None]:
    """After an error, raise that no model has all weights if the source is freed."""
    try:
        yield
    except Exception as error:
        if not is_freed:
            raise
        raise RuntimeError(
            "reshard: part of the model has moved and is freed, the rest has not; build the models anew and "
            f"load a checkpoint. Cause: {error}"
        ) from error


def _done(plan: _RankPlan, rank: int) -> Resharded:
    messages = [message for step in plan.steps for message in step.messages]
    copied, read = (
        sum(move.size for moves in each for move in moves)
        for each in ([step.copied for step in plan.steps], [step.reads.moves for step in plan.steps])
    )
    received = sum(message.size for message in messages if message.receiver == rank)
    sent = sum(message.size for message in messages if message.sender == rank)
    return Resharded(copied, read, received, sent, len(messages))


class _TensorBatch(NamedTuple):
    """One rank's work on some of the tensors."""

    names: list[str]
    copied: list[BlockMove]  # from its own tensors
    reads: Reads
    messages: list[BlockMessage]  # that it sends or receives
    is_sent: bool  # whether any rank sends a message


class _RankPlan(NamedTuple):
    """One rank's plan of a call, without tensors; later calls may reuse it."""

    number: int  # the same on all ranks
    renaming: RenameArguments | None  # of this rank's `to`
    dtypes: dict[str, torch.dtype]  # of the sources
    steps: list[_TensorBatch]


class _KnownPlans:
    """One rank's plans in a world, by all that they depend on; used only if all ranks find theirs."""

    def __init__(self) -> None:
        self.known: dict[object, _RankPlan] = {}
        self._made = 0

    def next_number(self) -> int:
        self._made += 1
        return self._made

    def keep(self, places: object, plan: _RankPlan) -> None:
        if len(self.known) >= _MOST_PLANS:
            del self.known[next(iter(self.known))]
        self.known[places] = plan


_MOST_PLANS = 8
_plans_of: WeakKeyDictionary[ProcessGroup, _KnownPlans] = WeakKeyDictionary()


class _MovingState(NamedTuple):
    """Groups and entries of the optimizer whose state moves, and new tensors for this rank's shards."""

    groups: list[dict[str, Any]]
    entries: dict[str, Any]
    placed: dict[str, TensorShard | Tensor | None]


def _planned(
    number: int,
    told: _CallDescription,
    source: Side,
    target: Side,
    kept: Mapping[str, Any],
    resumed: OptimizerState | None,
    names: NamingScheme,
    cast: bool,
    free_source: bool,
    bucket_bytes: int,
    buckets: int,
) -> tuple[_RankPlan, _MovingState]:
    """Exchange descriptions of all ranks' tensors and plan the moves; all ranks raise if they do not fit."""
    with raise_on_all_ranks("reshard: what is told"):
        own_words = pickle.dumps(told)  # an optimizer's options may be anything
    words, renaming = _gathered(own_words), None
    with raise_on_all_ranks("reshard: names and optimizers"):
        known: dict[bytes, _CallDescription] = {
            each: pickle.loads(each) for each in {*words}
        }  # replicas tell the same
        told_by_all = [known[each] for each in words]
        if names != "own" and target.shards:
            renaming = _told_of_names(told_by_all, names)
            target.rename(*renaming)
        groups, entries = _told_of_optimizers(told_by_all)
        placed = {} if resumed is None else _placed(resumed, groups, entries)
        source.add(_shards_in(kept))
        target.add(_shards_in(placed))
        refuse_shared_memory(source, target, is_freed_later=free_source)
        own = Description.of(source, target)
    everybody, rank = _gathered(own), dist.get_rank()
    with raise_on_all_ranks("reshard: comparison of models"):
        held, needed = held_and_needed(everybody)
        dtypes = dtypes_of(held, needed, cast=cast)
        placements = placements_of(held, needed, dtypes)
        moves = moves_of(placements, [described.place for described in everybody], rank)
        peers = readable(moves, everybody, rank)
    read_by_all = _gathered(frozenset(peers))
    parts = steps_of(placements, bucket_bytes * buckets) if free_source else [[*dtypes]]
    step_of = {name: number for number, some in enumerate(parts) for name in some}
    sorted_moves: list[list[BlockMove]] = [[] for _ in parts]
    for move in moves:
        sorted_moves[step_of[move.name]].append(move)
    steps = [
        _TensorBatch(
            some,
            [move for move in own_moves if move.sender == move.receiver],
            Reads([m for m in own_moves if m.receiver == rank and m.sender in peers], peers, dtypes),
            messages_of(
                [m for m in own_moves if m.sender not in read_by_all[m.receiver]],
                bucket_bytes,
                len(everybody),
            ),
            is_sent=False,
        )
        for some, own_moves in zip(parts, sorted_moves, strict=True)
    ]
    counts = _gathered([len(step.messages) for step in steps])
    steps = [
        step._replace(is_sent=any(count[number] for count in counts)) for number, step in enumerate(steps)
    ]
    return _RankPlan(number, renaming, dtypes, steps), _MovingState(groups, entries, placed)


def _gathered(own: T) -> list[T]:
    if dist.get_world_size() == 1:
        return [own]
    return [pickle.loads(each) for each in bytes_of_all("reshard", pickle.dumps(own), c10d.default_group())]


class _CallDescription(NamedTuple):
    """What one rank sends to all ranks first, before tensors are compared."""

    shapes: dict[str, tuple[int, ...]]  # full shapes of the tensors that it holds
    heads: Heads | None
    groups: list[dict[str, Any]] | None  # of the optimizer whose state moves; None: it has none
    entries: dict[str, Any]  # of its state: tensors as `Described`, numbers as they are
    is_resumed: bool  # whether it has an optimizer that takes the state


def _heads(given: object) -> Heads | None:
    model = unwrapped(given) if isinstance(given, nn.Module) else given
    if not isinstance(model, GPT):
        return None
    return Heads(model.config.num_heads, model.config.num_kv_heads or model.config.num_heads)


RenameArguments = tuple[dict[str, tuple[int, ...]], NamingScheme, Heads | None]  # arguments of `Side.rename`


def _told_of_names(everybody: Sequence[_CallDescription], names: NamingScheme) -> RenameArguments:
    shapes = {name: shape for told in everybody for name, shape in told.shapes.items()}
    return shapes, names, next((told.heads for told in everybody if told.heads is not None), None)


def _described(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, TensorShard):
            found[name] = Described(value.shape, value.local.dtype)
        else:
            found[name] = value.cpu() if isinstance(value, Tensor) else value
    return found


def _told_of_optimizers(everybody: Sequence[_CallDescription]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups and entries of the optimizer whose state moves; each from the first rank that has it."""
    entries = {name: value for told in reversed(everybody) for name, value in told.entries.items()}
    groups = next((told.groups for told in everybody if told.groups is not None), None)
    if (groups is not None) != any(told.is_resumed for told in everybody):
        missing = "optimizer" if groups is None else "to_optimizer"
        raise ValueError(
            f"{missing}: expected an optimizer on at least one rank, for the state of the other, got none"
        )
    return groups or [], entries


def _placed(
    resumed: OptimizerState, groups: list[dict[str, Any]], entries: Mapping[str, Any]
) -> dict[str, TensorShard | Tensor | None]:
    """Return new tensors for an optimizer's state; numbers that are tensors get their values."""
    resumed.require_groups(groups)
    resumed.require_options(groups)
    placed = resumed.place_for(
        {
            name: Described(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
            for name, value in entries.items()
            if isinstance(value, Tensor | Described)
        }
    )
    for name, tensor in placed.items():
        if isinstance(tensor, Tensor):
            tensor.copy_(entries[name])
    return placed


def _shards_in(content: Mapping[str, object]) -> dict[str, TensorShard]:
    return {name: value for name, value in content.items() if isinstance(value, TensorShard)}
