"""Cross-entropy of a column-parallel linear layer, whose logits exist for one chunk of tokens at a time.

It has two faces: `linear_cross_entropy`, and `linear_logprobs`, which is the loss of each token with its sign
changed, of logits over a temperature, for several targets a token, with entropies.

R ranks, T tokens, H features, V columns a rank:

    hidden_shard   (T / R, H)   our tokens under sequence parallelism, else hidden (T, H) on every rank
    weight_shard   (V, H)       our ids             target   (T,)    the same on all ranks
    bias_shard     (V,)

    forward, for each chunk of tokens
        z        = hidden @ weight_shard.T + bias_shard     (chunk, V)
        logits   = softcap tanh(z / softcap), or z          in fp32 or wider with a softcap
        loss     = as in `vocab_cross_entropy`, with class weights and z-loss
        dlogits  = p - q                                    in the place of the logits
        dz       = dlogits (1 - (logits / softcap)²)
        dhidden  = dz @ weight_shard                        partial
        dweight += dz.T @ hidden                            in fp32 or wider
        dbias   += dz.sum(0)                                the same
    backward
        dhidden  = all_reduce(dhidden * dloss), or reduce_scatter under sequence parallelism
        dweight  = dweight * dloss,  dbias = dbias * dloss

This takes a reduction that weighs tokens alike: "mean", over tokens that are not ignored, or "sum". The mean
divides losses by the sum of their targets' class weights, as torch does, and the z-loss by the number of
tokens: its coefficient is scaled in forward, so that one factor is left. With "none" forward computes losses
alone, and backward the logits again, chunk by chunk, with the gradient of each loss: four products instead of
three, for any weights of tokens. So do log-probabilities. With n targets of a token, x = logits / temperature
and log p = x - log Σ exp(x):

    entropy  = -Σ p log p
    dlogits  = (Σₙ dlogprobₙ ([id = targetₙ] - p) - dentropy p (log p + entropy)) / temperature

With top_k logits under the k-th largest of a token are minus infinity in all of this: p of these ids is 0,
and so are their gradients.

Saved for backward: dhidden and dweight; with "none" hidden, weight_shard and three numbers a token; for
log-probabilities hidden, weight_shard, n targets and three numbers a token, or four with top_k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.dispatch.products import sums_dtype
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    Context,
    any_requires_grad,
    autocast,
    check_linear,
    computed,
    features_of,
    is_casting,
    tokens_of,
)
from tpkernels.ops.main_grad import asked_for, check_main_grad
from tpkernels.ops.matmul import Plain
from tpkernels.ops.tensor_parallel.parallel import (
    compare_request,
    refuse_tokens,
    split_of,
    strategy_of,
)
from tpkernels.ops.vocab.cross_entropy import How, Known, LossOptions, in_dtype_of_loss, sharded_loss
from tpkernels.ops.vocab.head_chunks import Reduction as Reduction
from tpkernels.ops.vocab.head_chunks import reduced_loss, scaled_sum, token_gradients, token_losses
from tpkernels.ops.vocab.vocabulary import require_ids

OP = "linear_cross_entropy"
LEAST_TEMPERATURE = 1e-30  # logits over it must be finite in fp32
MOST_TEMPERATURE = 1e30  # its inverse is above 0 in fp32


class LossMetrics:
    """What else a call of `linear_cross_entropy` finds out; each call writes it. Without gradients.

    With "mean" and "sum" scalars, with "none" of each token; the same on all ranks.

    z_loss: that part of the loss; None without it
    accuracy: of the tokens that are not ignored, the fraction whose target has the largest logit, and the
        lowest id of equal ones. With "none" booleans
    """

    z_loss: Tensor | None = None
    accuracy: Tensor | None = None


def linear_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: ProcessGroup,
    *,
    bias_shard: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    metrics: LossMetrics | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
    quantize: Recipe | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Compute the loss of logits hidden weightᵀ + bias, as `F.linear_cross_entropy` of the full weight.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (columns of this rank, features), the same number on every rank
    target: (tokens, ...) ids, the same on all ranks
    bias_shard: (columns of this rank,)
    softcap: bounds logits to softcap tanh(logits / softcap)
    class_weight: (vocab_size,) of all ids, the same on all ranks, without a gradient; "mean" divides by those
        of targets, as torch does
    z_loss: coefficient of the squared logarithm of Σ exp(logits), which is added to each token's loss
    reduction: "mean" over targets that are not ignored (0 without any), "sum", or "none"
    metrics: where the z-loss and the accuracy are written
    vocab_size: of the full vocabulary, if rows of weight past it are padding
    chunk_tokens: tokens in a chunk; by default its logits have as many elements as hidden
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    quantize: compute the products in fp8
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    returns: a scalar, or (tokens, ...) with "none"; in fp32 or wider
    """
    tp = split_of(OP, group, sequence_parallel, segments=tp_invariant)
    with tp.call:
        if reduction not in get_args(Reduction):
            raise ValueError(
                f"{OP}: expected reduction of {', '.join(get_args(Reduction))}; got {reduction!r}"
            )
        options = LossOptions(
            OP,
            vocab_size,
            label_smoothing,
            ignore_index,
            None,
            chunk_tokens,
            softcap=softcap,
            z_loss=z_loss,
            metrics=metrics is not None,
        )
        more = quantize, reduction
        hidden, weight_shard, bias_shard, matmul = _checked(
            hidden, weight_shard, bias_shard, main_grad, class_weight, options, tp, more
        )
        _check_target(OP, target, hidden, tp)
        head = tokens_of(hidden), weight_shard, bias_shard
        class_weight = in_dtype_of_loss(class_weight, hidden)
        arguments = *head, target.reshape(-1), class_weight, (options, tp, matmul), main_grad
        loss: Tensor
        shape: Sequence[int] = ()
        if reduction == "none":
            shape = target.shape
            loss, _, squared, correct = computed(_TokenLosses, *arguments)
        else:
            wanted = [any_requires_grad(each) for each in head]
            loss, _, squared, correct = computed(_ReducedLoss, *arguments, reduction, *wanted)
        if metrics is not None:
            metrics.z_loss = (squared * z_loss).view(shape) if z_loss else None
            metrics.accuracy = correct.view(shape)
    return loss.view(shape)


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: ProcessGroup,
    *,
    bias_shard: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
    quantize: Recipe | None = None,
    tp_invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities of targets, log_softmax(logits / temperature), and entropies.

    Logits are those of `linear_cross_entropy`: hidden weightᵀ + bias, bounded by the softcap.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (columns of this rank, features), the same number on every rank
    target: (tokens, ...) ids, the same on all ranks, or (tokens, ..., n): n targets of each token
    top_k: only the k largest logits of a token count, and logits equal to the smallest of these, as in
        `TopKLogitsWarper` of transformers; other targets have minus infinity and no gradient
    return_entropy: also return the entropy over the ids that count, at the temperature
    ignore_index: a target whose log-probability and gradient are 0; the entropy is 0 if all n are ignored
    Others as in `linear_cross_entropy`.
    returns: log-probabilities (like target), and entropies (tokens, ...) or None; in fp32 or wider
    """
    op = "linear_logprobs"
    tp = split_of(op, group, sequence_parallel, segments=tp_invariant)
    with tp.call:
        if (
            not isinstance(temperature, int | float)
            or not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE
        ):
            raise ValueError(
                f"{op}: expected a temperature from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, got "
                f"{temperature!r}"
            )
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise ValueError(f"{op}: expected top_k of at least 1, got {top_k!r}; None keeps all ids")
        scale = 1 / temperature if temperature != 1 or return_entropy else None
        options = LossOptions(op, vocab_size, 0.0, ignore_index, scale, chunk_tokens, top_k, softcap)
        more = quantize, return_entropy
        hidden, weight_shard, bias_shard, matmul = _checked(
            hidden, weight_shard, bias_shard, main_grad, None, options, tp, more
        )
        if top_k is not None and top_k >= (vocab_size or tp.ranks * weight_shard.shape[0]):
            options = options._replace(top_k=None)
        rows = _check_target(op, target, hidden, tp, several=True)
        targets = target.reshape(math.prod(rows), *target.shape[len(rows) :])
        head, how = (tokens_of(hidden), weight_shard, bias_shard), (options, tp, matmul)
        loss, entropy, *_ = computed(_TokenLosses, *head, targets, None, how, main_grad)
    logprobs = (0 - loss).view(target.shape)  # 0 of an ignored target, and not -0
    return logprobs, entropy.view(rows) if return_entropy else None


def _checked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    tp: TensorParallel,
    more: tuple[Recipe | None, object],
) -> tuple[Tensor, Tensor, Tensor | None, Plain]:
    """Hidden, weight and bias, cast as autocast says, and how they are multiplied; raises at mistakes.

    more: in which fp8, and what else ranks must have alike
    """
    op, softcap = options.op, options.softcap
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise ValueError(f"{op}: expected chunk_tokens of at least 1, got {options.chunk_tokens}")
    if softcap is not None and not (isinstance(softcap, int | float) and 0 < softcap < math.inf):
        raise ValueError(f"{op}: expected softcap above 0, got {softcap!r}; None leaves logits as they are")
    features = features_of(op, hidden)
    given = [each is None for each in (bias, class_weight)]
    compare_request(op, tp, hidden, [weight, bias], (*options[1:], *more, *given))
    if tp.sequence_parallel and hidden.ndim < 2:
        refuse_tokens(op, hidden, "hidden")
    if is_casting(hidden):
        hidden, weight, bias = autocast(hidden, weight, bias)
    check_linear(op, hidden, features, weight, bias, ("weight_shard", "bias_shard"))
    check_main_grad(op, main_grad, weight)
    matmul = strategy_of(op, tp, more[0], hidden)
    sharded_loss(options, weight.shape[0], tp, class_weight, hidden)  # raises if the options are wrong
    return hidden, weight, bias, matmul


def _check_target(
    op: str, target: Tensor, hidden: Tensor, tp: TensorParallel, *, several: bool = False
) -> list[int]:
    """The leading dimensions of all tokens; raises unless target has them, or one more if `several`."""
    rows = list(hidden.shape[:-1])
    if tp.sequence_parallel:
        rows[0] *= tp.ranks
    if list(target.shape) != rows and not (several and list(target.shape[:-1]) == rows):
        raise ValueError(
            f"{op}: expected target {tuple(rows)}{', or one dimension more,' * several} for hidden "
            f"{tuple(hidden.shape)}{f' of each of {tp.ranks} ranks' * tp.sequence_parallel}, got "
            f"{tuple(target.shape)}"
        )
    require_ids(op, "target", target, hidden)
    return rows


class _ReducedLoss(torch.autograd.Function):
    """Losses that weigh alike: forward computes their gradients, up to a factor."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        how: How,
        main_grad: Tensor | None,
        reduction: Reduction,
        *needs: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        options, tp, matmul = how
        given = True, True, *needs, options.metrics, options.metrics
        arguments = hidden, weight, bias, target, class_weight, *needs, reduction, *options
        loss, share, dhidden, dweight, dbias, *metrics = reduced_loss(
            *arguments, tp=tp, matmul=matmul, given=given
        )
        ctx.how, ctx.main_grad, ctx.dtype = how, main_grad, weight.dtype
        ctx.save_for_backward(share, dhidden, dweight, dbias)
        if options.metrics:
            ctx.mark_non_differentiable(*metrics)
        return loss, share, *metrics  # as an output share is connected with the inputs, which are not saved

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        how: How,
    ) -> spmd_rules.Typed:
        options, tp, _ = how
        losses = spmd_rules.head_losses(hidden, weight, bias, target, class_weight, tp)
        loss = spmd_rules.einsum("t->", losses)
        return loss, loss, *([loss] * 2 if options.metrics else [None] * 2)

    @staticmethod
    @first_order(OP, reads_intermediates=True)
    def backward(ctx: Context, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        share, dhidden, dweight, dbias = ctx.saved_tensors
        if not all(asked_for(ctx, [ctx.main_grad], [True], 1)):
            dweight = None
        (options, tp, matmul), scale = ctx.how, dloss * share
        # scaled by the gradient of the loss: fp16 holds them before the division by tokens, not after
        if dhidden is not None:
            with tp.call:
                (dhidden,) = scaled_sum(dhidden, scale, ctx.dtype, options.op, tp=tp, matmul=matmul)
        if dweight is not None:
            dweight = _delivered(dweight * scale, ctx.dtype, ctx.main_grad)
        if dbias is not None:
            dbias = (dbias * scale).to(ctx.dtype)
        return dhidden, dweight, dbias, *([None] * 8)


class _TokenLosses(torch.autograd.Function):
    """A loss of each target, and entropies with a scale: gradients are computed in backward, from theirs."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        how: How,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        options, tp, matmul = how
        ctx.set_materialize_grads(False)
        arguments = hidden, weight, bias, target, class_weight, *options
        loss, *found = token_losses(*arguments, tp=tp, matmul=matmul, given=options.results)
        known = Known(*found)
        ctx.op = f"{options.op} in fp8" if matmul.recipe else options.op
        ctx.how, ctx.main_grad = how, main_grad
        ctx.save_for_backward(hidden, weight, bias, class_weight, *known._replace(correct=None))
        if not options.metrics:
            return loss, known.entropy, None, None
        assert known.correct is not None
        squared = known.squared_log_sum
        ctx.mark_non_differentiable(squared, known.correct)
        return loss, known.entropy, squared, known.correct

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        how: How,
    ) -> spmd_rules.Typed:
        options, tp, _ = how
        losses = spmd_rules.head_losses(hidden, weight, bias, target, class_weight, tp)
        of_rows = losses if target.ndim == 1 else spmd_rules.einsum("tn->t", losses)
        return losses, of_rows, *([of_rows] * 2 if options.metrics else [None] * 2)

    @staticmethod
    @first_order()
    def backward(
        ctx: Context, dloss: Tensor | None, dentropy: Tensor | None, *of_metrics: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, class_weight, *statistics = ctx.saved_tensors
        known = Known(*statistics)
        if dloss is None:
            dloss = torch.zeros_like(known.target, dtype=sums_dtype(weight.dtype))
        needs_dhidden, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        (needs_dweight,) = asked_for(ctx, [ctx.main_grad], [needs_dweight], 1)
        options, tp, matmul = ctx.how
        given = needs_dhidden, needs_dweight, needs_dbias
        with tp.call:
            arguments = dloss, dentropy, hidden, weight, bias, class_weight, *given, *known, *options
            dhidden, dweight, dbias = token_gradients(*arguments, tp=tp, matmul=matmul, given=given)
        if dweight is not None:
            dweight = _delivered(dweight, weight.dtype, ctx.main_grad)
        dbias = None if dbias is None else dbias.to(weight.dtype)
        return dhidden, dweight, dbias, *([None] * 4)


def _delivered(dweight: Tensor, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """Return the weight's gradient in its dtype, or add it to main_grad and return None."""
    if main_grad is None:
        return dweight.to(dtype)
    main_grad.add_(dweight)
    return None
