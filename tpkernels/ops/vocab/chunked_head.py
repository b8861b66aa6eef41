"""What `linear_cross_entropy`, which has the equations, computes: a chunk of tokens after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.steps import steps_on
from tpkernels.ops.tensor_parallel.parallel import start_rows, start_sum
from tpkernels.ops.vocab.cross_entropy import (
    IGNORED,
    LossCall,
    counted_targets,
    logits_gradient,
    row_losses,
)
from tpkernels.ops.vocab.vocabulary import VocabShard

OP = "linear_cross_entropy"
Reduction = Literal["mean", "sum", "none"]
LEAST_TOKENS = 128  # in a chunk by default; chosen without measuring


@dataclass(frozen=True)
class HeadCall:
    """What a call is besides its tensors."""

    loss: LossCall
    sequence_parallel: bool
    chunk_tokens: int  # 0: see `chunks`
    main_grad: Tensor | None = None

    def as_options(self) -> tuple[str, int, float, int, bool, int]:
        """As an operator takes it."""
        return *self.loss.as_options(), self.sequence_parallel, self.chunk_tokens

    @staticmethod
    def of_options(
        weight: Tensor,
        group_name: str,
        vocab_size: int,
        label_smoothing: float,
        ignore_index: int,
        sequence_parallel: bool,
        chunk_tokens: int,
    ) -> HeadCall:
        shard = VocabShard.named(group_name, weight.shape[0], vocab_size)
        loss = LossCall(shard, label_smoothing, ignore_index, overwrite_logits=True)
        return HeadCall(loss, sequence_parallel, chunk_tokens)

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[slice]:
        """Rows of one chunk after the other, the same on all ranks.

        By default a chunk of logits has as many elements as all of hidden.
        """
        size = self.chunk_tokens or max(LEAST_TOKENS, -(-hidden.numel() // weight.shape[0]))
        for start in range(0, len(hidden), size):
            yield slice(start, start + size)


class HeadGradients:
    """This rank's parts of the gradients, summed over chunks; None where nobody asks."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs_dhidden: bool, needs_dweight: bool) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._steps, self._hidden, self._weight = steps_on(hidden.device), hidden, weight
        self.dhidden = torch.empty_like(hidden) if needs_dhidden else None
        self.dweight = torch.zeros_like(weight, dtype=wide) if needs_dweight else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dhidden is not None:
            self.dhidden[rows] = self._steps.dgrad(dlogits, self._weight)
        if self.dweight is not None:
            self._steps.wgrad_accumulate_(self.dweight, dlogits, self._hidden[rows])


def whole_hidden(call: HeadCall, hidden: Tensor) -> Tensor:
    """All tokens."""
    return (
        start_rows(OP, "gather of hidden", hidden, call.loss.shard.group).wait()
        if call.sequence_parallel
        else hidden
    )


def losses_by_chunk(
    call: HeadCall, hidden: Tensor, weight: Tensor, target: Tensor, gradients: HeadGradients | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, maximum, total) of each token; `gradients` gets those of the sum of the losses."""
    steps = steps_on(hidden.device)
    found = hidden.new_empty(3, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))

    def take(rows: slice) -> None:  # a function, so that its logits are gone when it returns
        logits, _ = steps.linear(hidden[rows], weight, None, "none", False)
        loss, maximum, total = row_losses(OP, call.loss, logits, target[rows])
        if gradients is not None:
            one = torch.ones_like(loss)
            gradients.add(rows, logits_gradient(call.loss, logits, target[rows], maximum, total, one))
        found[:, rows] = torch.stack([loss, maximum, total])

    for rows in call.chunks(hidden, weight):
        take(rows)
    loss, maximum, total = found.unbind()
    return loss, maximum, total


def gradients_by_chunk(
    call: HeadCall,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    dloss: Tensor,
    gradients: HeadGradients,
) -> None:
    """The gradients of losses that are known, for a gradient of each: their logits are computed again."""
    steps = steps_on(hidden.device)

    def take(rows: slice) -> None:
        logits, _ = steps.linear(hidden[rows], weight, None, "none", False)
        dlogits = logits_gradient(call.loss, logits, target[rows], maximum[rows], total[rows], dloss[rows])
        gradients.add(rows, dlogits)

    for rows in call.chunks(hidden, weight):
        take(rows)


def share_of_token(target: Tensor, reduction: Reduction, dtype: torch.dtype) -> Tensor:
    """What a token's loss counts for in the reduced loss: one, or one of all that are not ignored."""
    counted = (target != IGNORED).sum() if reduction == "mean" else torch.ones((), device=target.device)
    return counted.clamp_min(1).to(dtype).reciprocal()  # none: zero, and not zero by zero


@all_or_fail
def reduced_loss(
    call: HeadCall,
    reduction: Reduction,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(loss, what each token counts for, dhidden, dweight); gradients of the sum, this rank's part."""
    target = counted_targets(OP, call.loss, target)
    hidden = whole_hidden(call, hidden)
    gradients = HeadGradients(hidden, weight, needs_dhidden, needs_dweight)
    wanted = gradients if needs_dhidden or needs_dweight else None
    losses, _, _ = losses_by_chunk(call, hidden, weight, target, wanted)
    share = share_of_token(target, reduction, losses.dtype)
    return losses.sum() * share, share, gradients.dhidden, gradients.dweight


@all_or_fail
def scaled(
    call: HeadCall, scale: Tensor, dhidden: Tensor | None, dweight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients for one of the loss: fp16 holds them before they are divided by all tokens, not after."""
    return (
        None if dhidden is None else summed_over_ranks(call, dhidden, scale),
        None if dweight is None else delivered(call, dweight * scale, dtype),
    )


@all_or_fail
def token_losses(
    call: HeadCall, hidden: Tensor, weight: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, target without ignored ones, maximum, total) of each token."""
    target = counted_targets(OP, call.loss, target)
    loss, maximum, total = losses_by_chunk(call, whole_hidden(call, hidden), weight, target, None)
    return loss, target, maximum, total


@all_or_fail
def token_gradients(
    call: HeadCall,
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """dtype: of dweight"""
    hidden = whole_hidden(call, hidden)
    gradients = HeadGradients(hidden, weight, needs_dhidden, needs_dweight)
    gradients_by_chunk(call, hidden, weight, target, maximum, total, dloss, gradients)
    dhidden, dweight = gradients.dhidden, gradients.dweight
    return (
        None if dhidden is None else summed_over_ranks(call, dhidden, None),
        None if dweight is None else delivered(call, dweight, dtype),
    )


def delivered(call: HeadCall, dweight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The weight's gradient, rounded once; None if it was added to main_grad."""
    if call.main_grad is None:
        return dweight.to(dtype)
    call.main_grad.add_(dweight)
    return None


def summed_over_ranks(call: HeadCall, dhidden: Tensor, scale: Tensor | None) -> Tensor:
    """The sum of the ranks' gradients of hidden, or this rank's tokens of it."""
    return start_sum(
        f"{OP} backward",
        lambda rows: dhidden[rows] if scale is None else dhidden[rows] * scale,
        dhidden.shape[0],
        dhidden.shape[1],
        dhidden,
        call.loss.shard.group,
        scatter=call.sequence_parallel,
        overlap=True,
    ).wait()
