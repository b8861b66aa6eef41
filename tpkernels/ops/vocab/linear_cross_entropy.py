"""Cross-entropy of a column-parallel linear layer, whose logits exist for one chunk of tokens at a time.

R ranks, T tokens, H features, V columns a rank:

    hidden_shard   (T / R, H)   our tokens under sequence parallelism, else hidden (T, H) on every rank
    weight_shard   (V, H)       our ids             target   (T,)    the same on all ranks

    forward, for each chunk of tokens
        logits   = hidden @ weight_shard.T          (chunk, V)
        loss     = as in `vocab_cross_entropy`
        dlogits  = p - q                            in the place of the logits
        dhidden  = dlogits @ weight_shard           partial
        dweight += dlogits.T @ hidden               in fp32 or wider
    backward
        dhidden  = all_reduce(dhidden * dloss), or reduce_scatter under sequence parallelism
        dweight  = dweight * dloss

This takes a reduction that weighs tokens alike: "mean", over tokens that are not ignored, or "sum". With
"none" forward computes losses alone, and backward the logits again, chunk by chunk, with the gradient of each
loss: four products instead of three, for any weights of tokens.

Saved for backward: dhidden and dweight; with "none" hidden, weight_shard and three numbers a token.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import from_entry
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    any_requires_grad,
    autocast,
    check_linear,
    features_of,
    is_casting,
    tokens_of,
)
from tpkernels.ops.main_grad import check_main_grad
from tpkernels.ops.tensor_parallel.parallel import checked_group
from tpkernels.ops.vocab.chunked_head import (
    OP,
    Reduction,
    reduced_gradients,
    reduced_loss,
    token_gradients,
    token_losses,
)
from tpkernels.ops.vocab.cross_entropy import LossOptions, sharded_loss
from tpkernels.ops.vocab.vocabulary import require_ids


@from_entry
def linear_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: ProcessGroup,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """The loss of hidden weightᵀ, as `F.linear_cross_entropy` of the full weight.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (columns of this rank, features), as many on every rank
    target: (tokens, ...) ids, the same on all ranks
    reduction: "mean" over targets that are not ignored (0 without any), "sum", or "none"
    vocab_size: of the full vocabulary, if rows of weight past it are padding
    chunk_tokens: in a chunk; by default its logits have as many elements as hidden
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    returns: a scalar, or (tokens, ...) with "none"; in fp32 or wider
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"{OP}: expected reduction of {', '.join(get_args(Reduction))}; got {reduction!r}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{OP}: expected chunk_tokens of at least 1, got {chunk_tokens}")
    features = features_of(OP, hidden)
    group = checked_group(
        group,
        OP,
        dtype=hidden.dtype,
        rows=hidden.shape[:-1],
        width=features,
        tensors=[hidden, weight_shard],
        options=(ignore_index, label_smoothing, reduction, vocab_size, sequence_parallel, chunk_tokens),
    )
    if is_casting(hidden):
        hidden, weight_shard = autocast(hidden, weight_shard)
    check_linear(OP, hidden, features, weight_shard, None, ("weight_shard", "no bias"))
    check_main_grad(OP, main_grad, weight_shard)
    options = LossOptions(group, vocab_size, label_smoothing, ignore_index, sequence_parallel, chunk_tokens)
    sharded_loss(OP, options, weight_shard.shape[0])  # raises if the options are wrong
    rows = list(hidden.shape[:-1])
    if sequence_parallel:
        if not rows:
            raise ValueError(f"{OP}: expected hidden (tokens, ..., features) with sequence_parallel, got 1-D")
        rows[0] *= group.size()
    if list(target.shape) != rows:
        raise ValueError(
            f"{OP}: expected target {tuple(rows)} for hidden {tuple(hidden.shape)}"
            f"{f' of each of {group.size()} ranks' * sequence_parallel}, got {tuple(target.shape)}"
        )
    require_ids(OP, "target", target, hidden)
    arguments = (tokens_of(hidden), weight_shard, target.reshape(-1), options, main_grad)
    loss: Tensor
    if reduction == "none":
        loss = _TokenLosses.apply(*arguments)  # type: ignore[no-untyped-call]
        return loss.view(target.shape)
    needs = any_requires_grad(hidden), any_requires_grad(weight_shard)
    loss, _ = _ReducedLoss.apply(*arguments, reduction, *needs)  # type: ignore[no-untyped-call]
    return loss


class _ReducedLoss(torch.autograd.Function):
    """Losses that weigh alike: their gradients up to a factor are there when forward is done."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        options: LossOptions,
        main_grad: Tensor | None,
        reduction: Reduction,
        needs_dhidden: bool,
        needs_dweight: bool,
    ) -> tuple[Tensor, Tensor]:
        loss, share, dhidden, dweight = reduced_loss(
            hidden, weight, target, needs_dhidden, needs_dweight, reduction, options
        )
        ctx.options, ctx.main_grad, ctx.dtype = options, main_grad, weight.dtype
        ctx.save_for_backward(share, dhidden, dweight)
        return loss, share  # as an output share is connected with the inputs, which are not saved

    @staticmethod
    @first_order(OP, reads_intermediates=True)
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        share, dhidden, dweight = ctx.saved_tensors
        dtype = ctx.dtype if ctx.main_grad is None else torch.promote_types(ctx.dtype, torch.float32)
        dhidden, dweight = reduced_gradients(dloss * share, dhidden, dweight, ctx.dtype, dtype, ctx.options)
        return dhidden, _delivered(dweight, ctx.main_grad), *([None] * 6)


class _TokenLosses(torch.autograd.Function):
    """A loss of each token: their gradients wait for those of the losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        options: LossOptions,
        main_grad: Tensor | None,
    ) -> Tensor:
        loss, *statistics = token_losses(hidden, weight, target, options)
        ctx.options, ctx.main_grad = options, main_grad
        ctx.save_for_backward(hidden, weight, *statistics)
        return loss

    @staticmethod
    @first_order(OP)
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, maximum, total = ctx.saved_tensors
        dtype = weight.dtype if ctx.main_grad is None else torch.promote_types(weight.dtype, torch.float32)
        needs_dhidden, needs_dweight, *_ = ctx.needs_input_grad
        dhidden, dweight = token_gradients(
            dloss, hidden, weight, target, maximum, total, needs_dhidden, needs_dweight, dtype, ctx.options
        )
        return dhidden, _delivered(dweight, ctx.main_grad), None, None, None


def _delivered(dweight: Tensor | None, main_grad: Tensor | None) -> Tensor | None:
    """The weight's gradient; None if it was added to main_grad."""
    if dweight is None or main_grad is None:
        return dweight
    main_grad.add_(dweight)
    return None
