"""Moves the weights of a live model to another sharding, without files or full tensors.

    reshard(trainer, to=generator)

All ranks describe their models and optimizers, then the blocks of each tensor that they hold and need. Each
computes the same plan from the descriptions of all. A model that does not fit is refused on all ranks before
anything is sent.

With free_source the model moves in steps: a few tensors of `to` get memory and are filled, and when all ranks
have their blocks of these tensors, the source's are freed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tpkernels.checkpoints.freed import leave_meta_device, require_freeable
from tpkernels.checkpoints.optimizer_state import GROUPS, OptimizerState
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.checkpoints.reshard_plan import (
    NamingScheme,
    ReshardPlan,
    Side,
    Tensors,
    plan_of,
    refuse_shared_memory,
)
from tpkernels.checkpoints.reshard_transfer import copy_own, exchange
from tpkernels.checkpoints.shards import TensorShard, unwrapped
from tpkernels.comm.agreement import bytes_of_all
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports.processes import machine
from tpkernels.groups import c10d
from tpkernels.layers.world import State
from tpkernels.models.config import GPTConfig
from tpkernels.models.gpt import GPT

naming_schemes: dict[str, NamingScheme] = {}  # of other libraries' models; adapters add theirs


class Resharded(NamedTuple):
    """The bytes that one rank moved, and its messages."""

    copied: int = 0  # from its own tensors
    received: int = 0
    sent: int = 0
    messages: int = 0


def reshard(
    model_or_state: nn.Module | Tensors | None,
    *,
    to: nn.Module | Tensors | None,
    names: str = "own",
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
        while it is filled: on the source's device, or, on a rank without source, on that of messages
    names: of `to`: "own" for those of `model_or_state`; for a GPT also "huggingface" or "megatron"
    optimizer, to_optimizer: the models' optimizers; their state and options move, too
    cast: convert tensors of another floating-point dtype
    free_source: free the model's parameters, and its optimizer's state, once they have moved
    state, to_state: as the models were built with; by default found in their layers, else the current one; a
        model without tensor-parallel layers and marks needs none
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
        if names not in ("own", *naming_schemes):
            raise ValueError(f"names: expected one of {', '.join(('own', *naming_schemes))}, got {names!r}")
        source = Side.of(model_or_state, state, "state")
        source.refuse_freed("has no numbers; move those of the model that it was moved to")
        if isinstance(to, nn.Module):
            held = next(iter(source.shards.values()), None)
            there = exchange_device(c10d.default_group()) if held is None else held.local.device
            leave_meta_device(unwrapped(to), there)
        target = Side.of(to, to_state, "to_state")
        if names != "own":
            target.refuse_freed(f"gets memory only where names='own', not {names!r}")
        entries = {} if optimizer is None else OptimizerState(optimizer, source.shards).content()
        options = entries.pop(GROUPS, None)
        resumed = None if to_optimizer is None else OptimizerState(to_optimizer, target.shards)
        own_call = _Call(
            machine(),
            dict(source.shapes),
            _config_of(model_or_state),
            options,
            _described(entries),
            resumed is not None,
        )
        source.add(_shards_in(entries))
        source.refuse_freed("has no numbers; the optimizer's state has moved without this one")
        if free_source:
            if model_or_state is not None and not isinstance(model_or_state, nn.Module):
                got = type(model_or_state).__name__
                raise TypeError(
                    f"free_source: expected a model, got {got}: others may hold the tensors in it"
                )
            require_freeable((name, shard.tensor) for name, shard in source.shards.items())
        pickled = pickle.dumps(own_call)  # an optimizer's options may be anything
    calls = _unpickled(_gathered(pickled))
    with raise_on_all_ranks("reshard: names and optimizers"):
        if names != "own" and target.shards:
            shapes = {name: shape for call in calls for name, shape in call.shapes.items()}
            config = next((call.config for call in calls if call.config is not None), None)
            target.rename(naming_schemes[names](target.shards, shapes, config), shapes)
        groups, moving = _optimizer_of(calls)
        if resumed is not None:
            resumed.require_groups(groups)
            resumed.require_options(groups)
            target.add(_shards_in(resumed.place_for(moving)))
        refuse_shared_memory(source, target, is_freed_later=free_source)
        pickled = pickle.dumps((source.described(), target.described()))
    described = _gathered(pickled)
    with raise_on_all_ranks("reshard: comparison of models"):
        plan = plan_of(
            described,
            tuple(call.machine for call in calls),
            dist.get_rank(),
            cast=cast,
            bucket_bytes=bucket_bytes,
            step_bytes=bucket_bytes * buckets if free_source else None,
        )
    with _named_if_halved(free_source):
        for step in plan.steps:
            with raise_on_all_ranks("reshard: copies"):
                target.give_memory(step.names)
                copy_own(step.copied, source.chunks, target.chunks)
            with raise_on_all_ranks("reshard: messages"):
                exchange(
                    step.messages, buckets, c10d.default_group(), source.chunks, target.chunks, plan.dtypes
                )
            if free_source:
                source.free(step.names)
        target.zero_padding()
    if resumed is not None:
        resumed.take(groups, moving)
    return _moved(plan, dist.get_rank())


@contextmanager
def _named_if_halved(is_freed: bool) -> Iterator[None]:
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


def _moved(plan: ReshardPlan, rank: int) -> Resharded:
    messages = [message for step in plan.steps for message in step.messages]
    return Resharded(
        sum(move.size for step in plan.steps for move in step.copied),
        sum(message.size for message in messages if message.receiver == rank),
        sum(message.size for message in messages if message.sender == rank),
        len(messages),
    )


class _Call(NamedTuple):
    """What one rank sends to all ranks first, before tensors are compared."""

    machine: str
    shapes: dict[str, tuple[int, ...]]  # full shapes of the tensors that it holds
    config: GPTConfig | None
    groups: list[dict[str, Any]] | None  # of the optimizer whose state moves; None: it has none
    entries: dict[str, Any]  # of its state: shards as full tensors on the meta device, others as they are
    is_resumed: bool  # whether it has an optimizer that takes the state


def _gathered(own: bytes) -> tuple[bytes, ...]:
    """Return the bytes of all ranks; ranks whose bytes are equal share one object."""
    if dist.get_world_size() == 1:
        return (own,)
    known: dict[bytes, bytes] = {}
    found = bytes_of_all("reshard", own, c10d.default_group())
    return tuple(known.setdefault(each, each) for each in found)


def _unpickled(pickled: Sequence[bytes]) -> list[_Call]:
    known = {each: pickle.loads(each) for each in set(pickled)}
    return [known[each] for each in pickled]


def _config_of(given: object) -> GPTConfig | None:
    model = unwrapped(given) if isinstance(given, nn.Module) else given
    return model.config if isinstance(model, GPT) else None


def _described(entries: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, TensorShard):
            found[name] = torch.empty(value.shape, dtype=value.local.dtype, device="meta")
        else:
            found[name] = value.cpu() if isinstance(value, Tensor) else value
    return found


def _optimizer_of(calls: Sequence[_Call]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups and entries of the optimizer whose state moves; each from the first rank that has it."""
    entries = {name: value for call in reversed(calls) for name, value in call.entries.items()}
    groups = next((call.groups for call in calls if call.groups is not None), None)
    if (groups is not None) != any(call.is_resumed for call in calls):
        missing = "optimizer" if groups is None else "to_optimizer"
        raise ValueError(
            f"{missing}: expected an optimizer on at least one rank, for the state of the other, got none"
        )
    return groups or [], entries


def _shards_in(content: Mapping[str, object]) -> dict[str, TensorShard]:
    return {name: value for name, value in content.items() if isinstance(value, TensorShard)}
