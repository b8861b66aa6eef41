"""Cross-entropy of logits whose vocabulary is split over ranks; nobody ever has all of a row.

R ranks, T tokens, K ids, V columns a rank:

    logits_shard   (T, V)    our columns            target, loss   (T,)    the same on all ranks

    local      maximum, Σ exp(x - maximum), x[target], Σ x     one pass over the logits
    gather     these four of all ranks, 16 bytes a token and rank: the only communication
    loss       -Σ q log p,  q = 1 - s on the target, and s / K on every id;  s = label_smoothing K / (K - 1)
    backward   dlogits_shard = dloss (p - q)                   one pass, no communication

All is in fp32 or wider, also the loss. K counts ids and not padding, whose logits are never read and whose
gradient is zero. As all ranks combine the same numbers in the same order, they have the same bits.

Saved for backward: logits_shard, and three numbers a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.vocabulary_steps import vocabulary_steps_on
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import compiling, tokens_of
from tpkernels.ops.tensor_parallel.parallel import checked_group, gather_numbers, name_of
from tpkernels.ops.vocab.vocabulary import VocabShard, require_ids, require_in_vocabulary, vocab_shard

IGNORED = -1  # what an ignored target is from here on, whatever the caller calls it


@dataclass(frozen=True)
class LossCall:
    """What a call is besides its tensors."""

    shard: VocabShard
    label_smoothing: float
    ignore_index: int
    overwrite_logits: bool = False

    @property
    def smoothing(self) -> float:
        """Megatron's: what the smoothed target gives away goes to the other K - 1 ids alike."""
        ids = self.shard.size
        return self.label_smoothing * ids / (ids - 1) if self.label_smoothing else 0.0

    def as_options(self) -> tuple[str, int, float, int]:
        """As an operator takes it."""
        return name_of(self.shard.group), self.shard.size, self.label_smoothing, self.ignore_index


def vocab_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    group: ProcessGroup,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """The loss of each token, as `F.cross_entropy(..., reduction="none")` of the whole logits.

    logits_shard: (..., columns of this rank), as many on every rank
    target: (...) ids, the same on all ranks
    label_smoothing: what is taken from the target for the other ids
    ignore_index: a target whose loss is zero
    vocab_size: of the whole vocabulary, if columns past it are padding
    overwrite_logits: let backward put the gradient where the logits are, which are lost then (under
        torch.compile, which plans memory itself, they are not)
    returns: (...), in fp32 or wider
    """
    op = "vocab_cross_entropy"
    if logits_shard.ndim < 1 or not logits_shard.is_floating_point():
        raise ValueError(
            f"{op}: expected floating-point logits_shard (..., columns), got {tuple(logits_shard.shape)} in "
            f"{logits_shard.dtype}"
        )
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(
            f"{op}: expected a target for each row of logits_shard {tuple(logits_shard.shape)}, got "
            f"{tuple(target.shape)}"
        )
    rows, width = logits_shard.shape[:-1], logits_shard.shape[-1]
    group = checked_group(
        group,
        op,
        dtype=logits_shard.dtype,
        rows=rows,
        width=width,
        tensors=[logits_shard],
        options=(label_smoothing, ignore_index, vocab_size),
    )
    shard = vocab_shard(op, group, width, vocab_size)
    call = loss_call(op, shard, label_smoothing, ignore_index, overwrite_logits)
    require_ids(op, "target", target, logits_shard)
    if overwrite_logits:
        _require_disposable(op, logits_shard)
    logits, flat_target = tokens_of(logits_shard), target.reshape(-1)
    loss: Tensor
    if compiling(op):
        loss = registered_vocab_cross_entropy(logits, flat_target, *call.as_options())[0]
    else:
        loss = _VocabCrossEntropy.apply(call, logits, flat_target)  # type: ignore[no-untyped-call]
    return loss.view(target.shape)


def _require_disposable(op: str, logits: Tensor) -> None:
    """Nobody's parameter, and no element twice."""
    if logits.is_leaf and logits.requires_grad:
        raise ValueError(
            f"{op}: expected no leaf with overwrite_logits: its gradient would lie in its own memory; pass "
            "what a layer computed, or leave overwrite_logits out"
        )
    if torch._debug_has_internal_overlap(logits) == 1:
        raise ValueError(
            f"{op}: expected logits with memory of their own for each element with overwrite_logits, got "
            f"strides {logits.stride()} for shape {tuple(logits.shape)}; clone the expanded tensor"
        )


def loss_call(
    op: str, shard: VocabShard, label_smoothing: float, ignore_index: int, overwrite_logits: bool = False
) -> LossCall:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{op}: expected label_smoothing from 0 to less than 1, got {label_smoothing}")
    if label_smoothing and shard.size == 1:
        raise ValueError(f"{op}: expected no label_smoothing with one id: there is no other to give it to")
    return LossCall(shard, label_smoothing, ignore_index, overwrite_logits)


class _VocabCrossEntropy(torch.autograd.Function):
    """The eager way, straight to kernels and transfers."""

    @staticmethod
    def forward(ctx: Any, call: LossCall, logits: Tensor, target: Tensor) -> Tensor:
        target = counted_targets("vocab_cross_entropy", call, target)
        loss, maximum, total = row_losses("vocab_cross_entropy", call, logits, target)
        ctx.call = call
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(logits, target, maximum, total)
        return loss

    @staticmethod
    @first_order("vocab_cross_entropy")
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, maximum, total = ctx.saved_tensors
        return None, logits_gradient(ctx.call, logits, target, maximum, total, dloss), None


def counted_targets(op: str, call: LossCall, target: Tensor) -> Tensor:
    """The targets, those that are ignored being IGNORED; an error if one is no id."""
    require_in_vocabulary(op, "target", target, call.shard, call.ignore_index)
    return torch.where(target == call.ignore_index, IGNORED, target)


@all_or_fail
def row_losses(op: str, call: LossCall, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, maximum, total) of each row, over all ranks."""
    shard, s = call.shard, call.smoothing
    ours = vocabulary_steps_on(logits).softmax_statistics(logits, target, shard.columns, shard.first_id)
    # an unsmoothed loss does not ask for Σ x
    what = f"statistics (label_smoothing {s:g}, ignore_index {call.ignore_index}, {shard.size} ids)"
    maxima, totals, picked, *summed = gather_numbers(op, what, ours if s else ours[:3], shard.group).unbind(1)
    maximum = maxima.amax(0)
    total = (totals * (maxima - maximum).exp()).sum(0)
    loss = total.log() + (maximum - picked.sum(0))
    if s:
        loss = (1 - s) * loss + s * (total.log() + (maximum - summed[0].sum(0) / shard.size))
    return loss.masked_fill(target == IGNORED, 0), maximum, total


def logits_gradient(
    call: LossCall, logits: Tensor, target: Tensor, maximum: Tensor, total: Tensor, dloss: Tensor
) -> Tensor:
    shard, s = call.shard, call.smoothing
    dlogits = vocabulary_steps_on(logits).cross_entropy_grad(
        logits,
        target,
        maximum,
        total,
        dloss.to(total.dtype).contiguous(),
        shard.columns,
        shard.first_id,
        1 - s,
        s / shard.size,
        call.overwrite_logits,
    )
    if call.overwrite_logits:
        increment_version(logits)  # whoever else wanted them for backward is told so by autograd
    return dlogits


# Under torch.compile: both directions as operators, which name their group.


@torch.library.custom_op("tpkernels::vocab_cross_entropy", mutates_args=())
def registered_vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group_name: str,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shard = VocabShard.named(group_name, logits.shape[1], vocab_size)
    call = LossCall(shard, label_smoothing, ignore_index)
    target = counted_targets("vocab_cross_entropy", call, target)
    loss, maximum, total = row_losses("vocab_cross_entropy", call, logits, target)
    return loss, target, maximum, total


@registered_vocab_cross_entropy.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
    return loss, torch.empty_like(target), torch.empty_like(loss), torch.empty_like(loss)


@torch.library.custom_op("tpkernels::vocab_cross_entropy_backward", mutates_args=())
def registered_vocab_cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    group_name: str,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
) -> Tensor:
    shard = VocabShard.named(group_name, logits.shape[1], vocab_size)
    return logits_gradient(
        LossCall(shard, label_smoothing, ignore_index), logits, target, maximum, total, dloss
    )


@registered_vocab_cross_entropy_backward.register_fake
def _(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    *options: Any,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _registered_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, *ctx.options = inputs
    ctx.save_for_backward(logits, *output[1:])


def _registered_backward(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dlogits = registered_vocab_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options)
    return dlogits, None, None, None, None, None


registered_vocab_cross_entropy.register_autograd(_registered_backward, setup_context=_registered_save)
