"""Decoding with a cache of keys and values whose log-probabilities have the bits of the trainer's.

What an engine must keep, beside TP-invariance: products of a multiple of 4 rows, 4 queries of each head, and
a cache of the trainer's length, with a mask. On CPUs other sizes are other calls of torch, with other bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.segments import tp_invariance
from tpkernels import GPT, create_parallel_state, manual_seed, ops, plan_groups
from tpkernels.groups.state import use
from tpkernels.layers.attention import ParallelAttention, Rotation
from tpkernels.models.config import GPTConfig

ROWS = 4  # at least


class Cache:
    """Keys and values of an attention, whose place it takes; of `length` tokens, or as many as there are."""

    def __init__(self, attention: ParallelAttention, length: int | None) -> None:
        self._attention, self._length, self._kept = attention, length, []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self._kept.append((key, value))
        t, layer = len(self._kept), self._attention
        keys, values = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        if self._length is not None:
            query = F.pad(query, (0, 0, 0, 0, 0, 0, 0, ROWS - 1))
            keys, values = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, self._length - t)) for x in (keys, values))
        seen = (torch.arange(len(keys)) < t).expand(len(query), -1)
        parts = [x.permute(1, 2, 0, 3).chunk(layer.segments or 1, 1) for x in (query, keys, values)]
        heads = zip(*parts, strict=True)
        mixed = torch.cat([layer._mixed(*(x.contiguous() for x in each), seen) for each in heads], 1)
        return mixed[:, :, :1].permute(2, 0, 1, 3).flatten(2)


@contextmanager
def caches(model: GPT, length: int | None) -> Iterator[None]:
    patched = []
    for block in model.blocks:
        patched.append(patch.object(block.attention, "_attend", Cache(block.attention, length).attend))
    for each in patched:
        each.start()
    try:
        yield
    finally:
        for each in patched:
            each.stop()


def hidden_at(model: GPT, ids: Tensor, t: int, length: int) -> Tensor:
    """Of token t alone, (1, batch, hidden_size)."""

    def rotation(whole: Rotation) -> Rotation:
        return Rotation(*(part[t : t + 1] for part in whole))

    if model.positions is not None:
        weight = model.positions.weight
        with patch.object(model.positions, "forward", lambda tokens: weight[t : t + 1, None]):
            return model.hidden(ids[:, t : t + 1])
    first = model.blocks[0].attention
    whole = partial(first.rotation, length)
    with patch.object(first, "rotation", lambda tokens, dtype, device: rotation(whole(dtype, device))):
        return model.hidden(ids[:, t : t + 1])


def built(config: GPTConfig, dtype: torch.dtype, **options: bool) -> GPT:
    world = dist.get_world_size()
    state = create_parallel_state(plan_groups(world_size=world, tensor=world))
    with use(state):
        manual_seed(3)
    return GPT(config, state=state, dtype=dtype, **options)


def logprobs_of(model: GPT, hidden: Tensor, target: Tensor) -> Tensor:
    how = {"vocab_size": model.config.vocab_size, "sequence_parallel": model.sequence_parallel}
    weight = (model.head or model.embedding).weight
    group, segments = model.world.group, model.world.tp_invariant
    return ops.linear_logprobs(hidden, weight, target, group, tp_invariant=segments, **how)[0]


def generated(
    config: GPTConfig, dtype: torch.dtype, segments: int, length: int, *, static: bool = True
) -> tuple[Tensor, Tensor]:
    """Ids that are drawn after one token, (batch, length), and the log-probability of each but the first."""
    with tp_invariance(segments), torch.no_grad():
        model, ids, found = built(config, dtype).eval(), torch.arange(ROWS)[:, None] * 7, []
        drawn = torch.Generator().manual_seed(1)
        with caches(model, length - 1 if static else None):
            for t in range(length - 1):
                hidden = hidden_at(model, ids, t, length)
                logits = model.logits(hidden)[0]
                chosen = ops.vocab_sample(
                    logits, model.world.group, vocab_size=config.vocab_size, generator=drawn
                )
                found.append(logprobs_of(model, hidden, chosen[None])[0])
                ids = torch.cat([ids, chosen[:, None]], 1)
        return ids, torch.stack(found, 1)


def scored(config: GPTConfig, dtype: torch.dtype, segments: int, ids: Tensor) -> Tensor:
    """The trainer's log-probabilities of all ids but the first, with a graph, under sequence parallelism."""
    with tp_invariance(segments):
        model = built(config, dtype, sequence_parallel=True)
        found = logprobs_of(model, model.hidden(ids[:, :-1]), ids[:, 1:].t().contiguous())
        found.sum().backward()
        return found.detach().t()
