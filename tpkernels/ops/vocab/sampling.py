"""Argmax, sampling and gathering of logits whose vocabulary is sharded: the same for any number of ranks.

R ranks, T tokens, V columns a rank:

    argmax    each rank's best, gathered: 16 bytes a token and rank
    sample    each rank's top_k candidates, gathered; all columns without top_k
    gather    all columns

What is gathered is the same on all ranks, in the order of ids, and what is done with it has the bits of an
unsharded computation. Columns past `vocab_size` are padding and never chosen. NaN counts as the largest, and
is chosen, as by torch.argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.ops.inputs import tokens_of
from tpkernels.ops.tensor_parallel.mappings import gather_from_region
from tpkernels.ops.tensor_parallel.parallel import compare_request, split_of
from tpkernels.ops.vocab.vocabulary import VocabShard, require_logits, vocab_shard


def vocab_gather(logits_shard: Tensor, group: ProcessGroup, *, vocab_size: int | None = None) -> Tensor:
    """Gather all logits of each token on every rank, without padding; differentiable.

    logits_shard: (..., columns of this rank)
    vocab_size: of the full vocabulary, if columns past it are padding
    returns: (..., vocab_size)
    """
    tp = split_of("vocab_gather", group)
    with tp.call:
        shard = _checked("vocab_gather", logits_shard, tp, vocab_size)
    return gather_from_region(logits_shard, group)[..., : shard.size]


@torch.no_grad()
def vocab_argmax(logits_shard: Tensor, group: ProcessGroup, *, vocab_size: int | None = None) -> Tensor:
    """Return the id of the largest logit of each token, the lowest of equal ones.

    logits_shard: (..., columns of this rank)
    vocab_size: of the full vocabulary, if columns past it are padding
    returns: (...) int64
    """
    tp = split_of("vocab_argmax", group)
    with tp.call:
        shard = _checked("vocab_argmax", logits_shard, tp, vocab_size)
        logits = _without_padding(tokens_of(logits_shard), shard)
        column = logits.argmax(1)
        best = logits.gather(1, column[:, None])[:, 0]
        # float64 holds every logit and every id exactly: one message for both
        ours = torch.stack([best.double(), (column + shard.first_id).double()])
        bests, ids = tp.gather_numbers("vocab_argmax", "best of each rank", ours).unbind(1)
        chosen = ids.gather(0, bests.argmax(0, keepdim=True))[0].long()
    return chosen.view(logits_shard.shape[:-1])


@torch.no_grad()
def vocab_sample(
    logits_shard: Tensor,
    group: ProcessGroup,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
) -> Tensor:
    """Draw an id for each token with the probabilities softmax(logits / temperature).

    logits_shard: (..., columns of this rank)
    top_k: draw among the k ids with the largest logits only; among equal logits the lower ids count
    top_p: draw among the fewest most probable ids whose probabilities add up to it only, after top_k
    vocab_size: of the full vocabulary, if columns past it are padding
    generator: draws a number for each token, by default torch's own; rank 0's numbers are used
    uniform: (...) numbers from 0 to less than 1 to use instead
    returns: (...) int64
    """
    op = "vocab_sample"
    tp = split_of(op, group)
    with tp.call:
        _require_options(temperature, top_k, top_p)
        options = temperature, top_k, top_p, uniform is None
        shard = _checked(op, logits_shard, tp, vocab_size, options)
        logits = _without_padding(tokens_of(logits_shard), shard)
        leading = logits_shard.shape[:-1]
        if uniform is None:
            uniform = torch.rand(leading, dtype=torch.float64, device=logits.device, generator=generator)
        elif uniform.shape != leading or uniform.device != logits.device:
            raise ValueError(
                f"{op}: expected uniform {tuple(leading)} on {logits.device}, got {tuple(uniform.shape)} on "
                f"{uniform.device}"
            )
        kept = shard.size if top_k is None else min(top_k, shard.size)
        uniform = tp.gather_numbers(op, "numbers to draw with", uniform.reshape(-1, 1).double())[0]
        if kept < shard.width:
            values, columns = _largest_first(logits, kept)
            ours = torch.stack([values.double(), (columns + shard.first_id).double()])
            # ranks follow each other as ids do, so that of equal logits the lower id still comes first
            values, ids = (
                tp.gather_numbers(op, f"{kept} best of each rank", ours)
                .permute(1, 2, 0, 3)
                .flatten(2)
                .unbind()
            )
        else:
            values = tp.gather_numbers(op, "logits", logits).transpose(0, 1).flatten(1)
            ids = torch.arange(values.shape[1], device=values.device).expand_as(values)
        values, places = _largest_first(values.double(), kept)
        place = _drawn(values / temperature, top_p, uniform)
    return ids.gather(1, places.gather(1, place))[:, 0].long().view(leading)


def kth_largest(op: str, logits: Tensor, shard: VocabShard, k: int) -> Tensor:
    """(tokens,): the k-th largest logit of each token over all ranks, of at least k ids; ties count each."""
    largest = logits[:, : shard.columns].topk(min(k, shard.columns)).values
    size = min(k, shard.width)
    if largest.shape[1] < size:  # padding
        largest = functional.pad(largest, (0, size - largest.shape[1]), value=-torch.inf)
    everybody = shard.tp.gather_numbers(op, f"{k} largest of each rank", largest)
    return everybody.transpose(0, 1).flatten(1).topk(k).values[:, -1]


def _drawn(scaled: Tensor, top_p: float | None, uniform: Tensor) -> Tensor:
    """Where the cumulative probability passes the uniform number: (tokens, 1). scaled: largest first"""
    probability = scaled.softmax(1)
    if top_p is not None:
        before = probability.cumsum(1) - probability
        probability = probability.masked_fill(before >= top_p, 0)
    cumulative = probability.cumsum(1)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return place.clamp_max((probability > 0).sum(1, keepdim=True) - 1).clamp_min(0)


def _largest_first(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row and their positions; of equal ones the first comes first."""
    ordered, places = values.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


def _without_padding(logits: Tensor, shard: VocabShard) -> Tensor:
    """Set padding columns to minus infinity, behind all others."""
    padding = torch.arange(shard.width, device=logits.device) >= shard.columns
    return logits.masked_fill(padding, -torch.inf)


def _checked(
    op: str, logits: Tensor, tp: TensorParallel, vocab_size: int | None, options: Sequence[object] = ()
) -> VocabShard:
    require_logits(op, logits)
    compare_request(op, tp, logits, options=[vocab_size, *options])
    return vocab_shard(op, tp, logits.shape[-1], vocab_size)


def _require_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 < temperature < math.inf:  # of infinite ones minus infinity, a forbidden id, would be NaN
        raise ValueError(
            f"vocab_sample: expected a finite temperature above 0, got {temperature}; use vocab_argmax for "
            "the best"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"vocab_sample: expected top_k of at least 1, got {top_k}; None keeps all ids")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"vocab_sample: expected top_p above 0 and at most 1, got {top_p}")
