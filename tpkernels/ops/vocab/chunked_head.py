"""What `linear_cross_entropy`, which has the equations, computes: one chunk of tokens after the other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Operator
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.segments import segment_sum
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.tensor_parallel.parallel import start_rows, start_sum
from tpkernels.ops.tensor_parallel.segments import (
    canonical,
    map_segments,
    segment_calls,
    segmented_weight_gradient,
    segments_of,
)
from tpkernels.ops.vocab.cross_entropy import IGNORED, LossOptions, sharded_loss
from tpkernels.tp_invariance import mode

OP = "linear_cross_entropy"
Reduction = Literal["mean", "sum", "none"]
LEAST_TOKENS = 128  # in a chunk by default; chosen without measuring


class PartialGradients:
    """This rank's terms of the gradients, summed over chunks; None where they are not needed."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, needs_dhidden: bool, needs_dweight: bool, group: ProcessGroup
    ) -> None:
        self._hidden, self._weight = hidden, weight
        self._segments = segments_of(OP, group)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dhidden = torch.empty_like(hidden, dtype=terms_dtype(hidden.dtype)) if needs_dhidden else None
        self.dweight = torch.zeros_like(weight, dtype=wide) if needs_dweight else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        segments, hidden = self._segments, self._hidden[rows]
        if self.dhidden is not None and segments:
            pairs = [(dlogits, self._weight)]
            self.dhidden[rows] = segment_sum(pairs, transposed=False, segments=segments)
        elif self.dhidden is not None:
            self.dhidden[rows] = primitives.dgrad(dlogits, self._weight)
        if self.dweight is not None:
            calls = segment_calls(segments, hidden.device)
            segmented_weight_gradient(dlogits, hidden, self.dweight, calls, dim=0)


def terms_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of this rank's terms of a sum over ranks, which are rounded one by one, but with TP-invariance not."""
    return sums_dtype(dtype) if mode.segments else dtype


def _full_hidden(hidden: Tensor, options: LossOptions) -> Tensor:
    return (
        start_rows(OP, "gather of hidden", hidden, options.group).wait()
        if options.sequence_parallel
        else hidden
    )


def _sum_over_ranks(
    dhidden: Tensor, scale: Tensor | None, dtype: torch.dtype, options: LossOptions
) -> Tensor:
    """The sum of the ranks' dhidden, or this rank's tokens of it, times scale."""
    term_scale = None if mode.segments else scale
    total = start_sum(
        f"{OP} backward",
        lambda rows: dhidden[rows] if term_scale is None else dhidden[rows] * term_scale,
        dhidden.shape[0],
        dhidden.shape[1],
        dhidden,
        options.group,
        scatter=options.sequence_parallel,
        overlap=True,
    ).wait()
    if scale is not None and mode.segments:
        total = total * scale
    return as_dtype(total, dtype)


def _logits_of_chunks(hidden: Tensor, weight: Tensor, options: LossOptions) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits, which are freed before the next ones are computed.

    By default a chunk of logits has as many elements as all of hidden; with TP-invariance those of all ranks.
    """
    calls = segment_calls(segments_of(OP, options.group), hidden.device)
    width = weight.shape[0] * (options.group.size() if mode.segments else 1)
    size = options.chunk_tokens or max(LEAST_TOKENS, -(-hidden.numel() // width))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        chunk = canonical(hidden[rows]) if calls else hidden[rows]
        yield rows, map_segments(calls, partial(_logits, chunk), weight, cut=0)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return primitives.linear(hidden, weight, None, "none", False)[0]


def _losses_by_chunk(
    options: LossOptions,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    gradients: PartialGradients | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, maximum, total) of each token; `gradients` gets those of the sum of the losses."""
    losses = sharded_loss(OP, options, weight.shape[0])
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    loss, maximum, total = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
    for rows, logits in _logits_of_chunks(hidden, weight, options):
        loss[rows], maximum[rows], total[rows] = losses.of_rows(logits, target[rows])
        if gradients is not None:
            one = torch.ones_like(loss[rows])
            gradients.add(
                rows, losses.gradient(logits, target[rows], maximum[rows], total[rows], one, in_place=True)
            )
        del logits
    return loss, maximum, total


@all_or_fail
def _reduced(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    reduction: Reduction,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(loss, what each token counts for, dhidden, dweight); gradients of the sum, this rank's terms."""
    losses = sharded_loss(OP, options, weight.shape[0])
    target = losses.counted(target)
    hidden = _full_hidden(hidden, options)
    gradients = PartialGradients(hidden, weight, needs_dhidden, needs_dweight, options.group)
    wanted = gradients if needs_dhidden or needs_dweight else None
    loss, *_ = _losses_by_chunk(options, hidden, weight, target, wanted)
    tokens = (target != IGNORED).sum() if reduction == "mean" else torch.ones((), device=target.device)
    share = tokens.clamp_min(1).to(loss.dtype).reciprocal()  # without tokens the loss is 0, and not NaN
    return loss.sum() * share, share, gradients.dhidden, gradients.dweight


def _reduced_shape(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    reduction: Reduction,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return (
        loss,
        torch.empty_like(loss),
        hidden.new_empty(target.shape[0], hidden.shape[1], dtype=terms_dtype(hidden.dtype))
        if needs_dhidden
        else None,
        torch.empty_like(weight, dtype=loss.dtype) if needs_dweight else None,
    )


@all_or_fail
def _scaled(
    scale: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    hidden_dtype: torch.dtype,
    dtype: torch.dtype,
    options: LossOptions,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients for one of the loss: fp16 holds them before they are divided by all tokens, not after."""
    return (
        None if dhidden is None else _sum_over_ranks(dhidden, scale, hidden_dtype, options),
        None if dweight is None else (dweight * scale).to(dtype),
    )


def _scaled_shape(
    scale: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    hidden_dtype: torch.dtype,
    dtype: torch.dtype,
    options: LossOptions,
) -> tuple[Tensor | None, Tensor | None]:
    ranks = options.group.size() if options.sequence_parallel else 1
    return (
        None
        if dhidden is None
        else dhidden.new_empty(dhidden.shape[0] // ranks, dhidden.shape[1], dtype=hidden_dtype),
        None if dweight is None else torch.empty_like(dweight, dtype=dtype),
    )


@all_or_fail
def _token_losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, target, maximum, total) of each token, ignored targets as IGNORED."""
    losses = sharded_loss(OP, options, weight.shape[0])
    target = losses.counted(target)
    hidden = _full_hidden(hidden, options)
    loss, maximum, total = _losses_by_chunk(options, hidden, weight, target, None)
    return loss, target, maximum, total


def _token_losses_shape(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty(target.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    return loss, torch.empty_like(target), torch.empty_like(loss), torch.empty_like(loss)


@all_or_fail
def _token_gradients(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    dtype: torch.dtype,
    options: LossOptions,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients for a gradient of each token's loss, whose logits are computed again.

    dtype: of dweight
    """
    losses = sharded_loss(OP, options, weight.shape[0])
    hidden = _full_hidden(hidden, options)
    gradients = PartialGradients(hidden, weight, needs_dhidden, needs_dweight, options.group)
    for rows, logits in _logits_of_chunks(hidden, weight, options):
        known = target[rows], maximum[rows], total[rows], dloss[rows]
        gradients.add(rows, losses.gradient(logits, *known, in_place=True))
        del logits
    dhidden, dweight = gradients.dhidden, gradients.dweight
    return (
        None if dhidden is None else _sum_over_ranks(dhidden, None, weight.dtype, options),
        None if dweight is None else dweight.to(dtype),
    )


def _token_gradients_shape(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    dtype: torch.dtype,
    options: LossOptions,
) -> tuple[Tensor | None, Tensor | None]:
    return (
        hidden.new_empty(hidden.shape) if needs_dhidden else None,
        weight.new_empty(weight.shape, dtype=dtype) if needs_dweight else None,
    )


reduced_loss = Operator(OP, _reduced, _reduced_shape)
reduced_gradients = Operator(f"{OP}_backward", _scaled, _scaled_shape)
token_losses = Operator("linear_token_losses", _token_losses, _token_losses_shape)
token_gradients = Operator("linear_token_losses_backward", _token_gradients, _token_gradients_shape)
