"""Cross-entropy of a column-parallel linear layer, whose logits exist for one chunk of tokens at a time.

It has two faces: `linear_cross_entropy`, and `linear_logprobs`, which is the loss of each token with its sign
changed, of logits over a temperature, for several targets a token, with entropies.

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
loss: four products instead of three, for any weights of tokens. So do log-probabilities. With n targets of a
token, x = logits / temperature and log p = x - log Σ exp(x):

    entropy  = -Σ p log p
    dlogits  = (Σₙ dlogprobₙ ([id = targetₙ] - p) - dentropy p (log p + entropy)) / temperature

With top_k logits under the k-th largest of a token are minus infinity in all of this: p of these ids is 0,
and so are their gradients.

Saved for backward: dhidden and dweight; with "none" hidden, weight_shard and three numbers a token; for
log-probabilities hidden, weight_shard, n targets and three numbers a token, or four with top_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Gather
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
from tpkernels.ops.quantized.weights import reuse_quantized_weights
from tpkernels.ops.tensor_parallel.parallel import (
    SplitOperator,
    compare_request,
    refuse_tokens,
    split_of,
    strategy_of,
)
from tpkernels.ops.vocab.cross_entropy import IGNORED, NOWHERE, Known, LossOptions, sharded_loss
from tpkernels.ops.vocab.partial_gradients import PartialGradients, sum_over_ranks, terms_dtype
from tpkernels.ops.vocab.sampling import kth_largest
from tpkernels.ops.vocab.vocabulary import require_ids

OP = "linear_cross_entropy"
Reduction = Literal["mean", "sum", "none"]
LEAST_TEMPERATURE = 1e-30  # logits over it must be finite in fp32
MOST_TEMPERATURE = 1e30  # its inverse is above 0 in fp32
LEAST_TOKENS = 128  # in a chunk by default; chosen without measuring
MASKS = 16  # in which the tokens of a chunk are masked, so that a mask takes little beside its logits


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
    quantize: Recipe | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Compute the loss of logits hidden weightᵀ, as `F.linear_cross_entropy` of the full weight.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (columns of this rank, features), the same number on every rank
    target: (tokens, ...) ids, the same on all ranks
    reduction: "mean" over targets that are not ignored (0 without any), "sum", or "none"
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
        options = LossOptions(OP, vocab_size, label_smoothing, ignore_index, None, chunk_tokens)
        hidden, weight_shard, matmul = _checked(
            hidden, weight_shard, main_grad, options, tp, quantize, reduction
        )
        _check_target(OP, target, hidden, tp)
        arguments = tokens_of(hidden), weight_shard, target.reshape(-1), (options, tp, matmul), main_grad
        loss: Tensor
        if reduction == "none":
            loss, _ = computed(_TokenLosses, *arguments)
            return loss.view(target.shape)
        needs = any_requires_grad(hidden), any_requires_grad(weight_shard)
        loss, _ = computed(_ReducedLoss, *arguments, reduction, *needs)
    return loss


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: ProcessGroup,
    *,
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
    """Compute log-probabilities of targets, log_softmax(hidden weightᵀ / temperature), and entropies.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (columns of this rank, features), the same number on every rank
    target: (tokens, ...) ids, the same on all ranks, or (tokens, ..., n): n targets of each token
    top_k: only the k largest logits of a token count, and logits equal to the smallest of these, as in
        `TopKLogitsWarper` of transformers; other targets have minus infinity and no gradient
    return_entropy: also return the entropy over the ids that count, at the temperature
    ignore_index: a target whose log-probability and gradient are 0; the entropy is 0 if all n are ignored
    vocab_size, chunk_tokens, main_grad, quantize, tp_invariant: as in `linear_cross_entropy`
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
        options = LossOptions(op, vocab_size, 0.0, ignore_index, scale, chunk_tokens, top_k)
        hidden, weight_shard, matmul = _checked(
            hidden, weight_shard, main_grad, options, tp, quantize, return_entropy
        )
        if top_k is not None and top_k >= (vocab_size or tp.ranks * weight_shard.shape[0]):
            options = options._replace(top_k=None)
        rows = _check_target(op, target, hidden, tp, several=True)
        targets = target.reshape(math.prod(rows), *target.shape[len(rows) :])
        how = options, tp, matmul
        loss, entropy = computed(_TokenLosses, tokens_of(hidden), weight_shard, targets, how, main_grad)
    logprobs = (0 - loss).view(target.shape)  # 0 of an ignored target, and not -0
    return logprobs, entropy.view(rows) if return_entropy else None


def _checked(
    hidden: Tensor,
    weight: Tensor,
    main_grad: Tensor | None,
    options: LossOptions,
    tp: TensorParallel,
    quantize: Recipe | None,
    more: object,
) -> tuple[Tensor, Tensor, Plain]:
    """Hidden and weight, cast as autocast says, and how they are multiplied; raises if anything is wrong.

    more: what else ranks must have alike
    """
    op = options.op
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise ValueError(f"{op}: expected chunk_tokens of at least 1, got {options.chunk_tokens}")
    features = features_of(op, hidden)
    compare_request(op, tp, hidden, [weight], (*options[1:], quantize, more))
    if tp.sequence_parallel and hidden.ndim < 2:
        refuse_tokens(op, hidden, "hidden")
    if is_casting(hidden):
        hidden, weight = autocast(hidden, weight)
    check_linear(op, hidden, features, weight, None, ("weight_shard", "no bias"))
    check_main_grad(op, main_grad, weight)
    matmul = strategy_of(op, tp, quantize, hidden)
    sharded_loss(options, weight.shape[0], tp)  # raises if the options are wrong
    return hidden, weight, matmul


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


How = tuple[LossOptions, TensorParallel, Plain]


class _ReducedLoss(torch.autograd.Function):
    """Losses that weigh alike: forward computes their gradients, up to a factor."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        how: How,
        main_grad: Tensor | None,
        reduction: Reduction,
        needs_dhidden: bool,
        needs_dweight: bool,
    ) -> tuple[Tensor, Tensor]:
        options, tp, matmul = how
        given = True, True, needs_dhidden, needs_dweight
        loss, share, dhidden, dweight = reduced_loss(
            hidden, weight, target, *given[2:], reduction, *options, tp=tp, matmul=matmul, given=given
        )
        ctx.how, ctx.main_grad, ctx.dtype = how, main_grad, weight.dtype
        ctx.save_for_backward(share, dhidden, dweight)
        return loss, share  # as an output share is connected with the inputs, which are not saved

    @staticmethod
    def spmd_typecheck(*, hidden: Tensor, weight: Tensor, target: Tensor, how: How) -> spmd_rules.Typed:
        _, tp, _ = how
        losses = spmd_rules.head_losses(hidden, weight, target, tp.group, tp.sequence_parallel)
        loss = spmd_rules.einsum("t->", losses)
        return loss, loss

    @staticmethod
    @first_order(OP, reads_intermediates=True)
    def backward(ctx: Context, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        share, dhidden, dweight = ctx.saved_tensors
        if not all(asked_for(ctx, [ctx.main_grad], [True], 1)):
            dweight = None
        dtype = ctx.dtype if ctx.main_grad is None else torch.promote_types(ctx.dtype, torch.float32)
        (options, tp, matmul), given = ctx.how, (dhidden is not None, dweight is not None)
        arguments = dloss * share, dhidden, dweight, ctx.dtype, dtype, options.op
        with tp.call:
            dhidden, dweight = reduced_gradients(*arguments, tp=tp, matmul=matmul, given=given)
        return dhidden, _delivered(dweight, ctx.main_grad), *([None] * 6)


class _TokenLosses(torch.autograd.Function):
    """A loss of each target, and entropies with a scale: gradients are computed in backward, from theirs."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        how: How,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        options, tp, matmul = how
        ctx.set_materialize_grads(False)
        given = True, True, True, True, options.scale is not None, options.top_k is not None
        found = token_losses(hidden, weight, target, *options, tp=tp, matmul=matmul, given=given)
        loss, known = found[0], Known(*found[1:])
        ctx.op = f"{options.op} in fp8" if matmul.recipe else options.op
        ctx.how, ctx.main_grad = how, main_grad
        ctx.save_for_backward(hidden, weight, *known)
        return loss, known.entropy

    @staticmethod
    def spmd_typecheck(*, hidden: Tensor, weight: Tensor, target: Tensor, how: How) -> spmd_rules.Typed:
        _, tp, _ = how
        losses = spmd_rules.head_losses(hidden, weight, target, tp.group, tp.sequence_parallel)
        return losses, losses if target.ndim == 1 else spmd_rules.einsum("tn->t", losses)

    @staticmethod
    @first_order()
    def backward(ctx: Context, dloss: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, *statistics = ctx.saved_tensors
        known, wide = Known(*statistics), torch.promote_types(weight.dtype, torch.float32)
        dtype = weight.dtype if ctx.main_grad is None else wide
        if dloss is None:
            dloss = torch.zeros_like(known.target, dtype=wide)
        needs_dhidden, needs_dweight, *_ = ctx.needs_input_grad
        (needs_dweight,) = asked_for(ctx, [ctx.main_grad], [needs_dweight], 1)
        (options, tp, matmul), given = ctx.how, (needs_dhidden, needs_dweight)
        with tp.call:
            dhidden, dweight = token_gradients(
                *(dloss, dentropy, hidden, weight, *known, *given, dtype, *options),
                tp=tp,
                matmul=matmul,
                given=given,
            )
        return dhidden, _delivered(dweight, ctx.main_grad), None, None, None


def _delivered(dweight: Tensor | None, main_grad: Tensor | None) -> Tensor | None:
    """Return the weight's gradient, or add it to main_grad and return None."""
    if dweight is None or main_grad is None:
        return dweight
    main_grad.add_(dweight)
    return None


def _logits_of_chunks(
    hidden: Tensor, weight: Tensor, options: LossOptions, tp: TensorParallel, matmul: Plain
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits; the caller frees these before the next are computed.

    By default a chunk of logits has as many elements as all of hidden; with TP-invariance those of all ranks.
    """
    width = weight.shape[0] * (tp.ranks if tp.segments else 1)
    size = options.chunk_tokens or max(LEAST_TOKENS, -(-hidden.numel() // width))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        yield rows, _logits(hidden[rows], weight, matmul)  # which no name here holds


def _logits(hidden: Tensor, weight: Tensor, matmul: Plain) -> Tensor:
    (logits,) = matmul.product(Gather(matmul.pack(hidden)), [weight], [None], dtype=hidden.dtype)
    return logits


def _losses_by_chunk(
    options: LossOptions,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    gradients: PartialGradients | None,
    tp: TensorParallel,
    matmul: Plain,
) -> tuple[Tensor, Known]:
    """Compute the loss of each target; add gradients of the sum of losses to `gradients`."""
    losses = sharded_loss(options, weight.shape[0], tp)
    loss, known = _empty_losses(hidden, target, options)
    for rows, logits in _logits_of_chunks(hidden, weight, options, tp, matmul):
        if options.top_k is not None and known.least is not None:
            known.least[rows] = kth_largest(options.op, logits, losses.shard, options.top_k)
            _forget_below_(logits, known.least[rows])
        of_chunk = losses.of_rows if gradients is None else losses.with_gradient
        loss[rows], found = of_chunk(logits, target[rows])
        for all_rows, some in zip(known[1:], found[1:], strict=True):
            if all_rows is not None and some is not None:
                all_rows[rows] = some
        if gradients is not None:
            gradients.add(rows, logits)
        del logits
    if options.top_k is not None:  # a target that was not kept: its gradient is that of a constant
        target.masked_fill_(loss == torch.inf, NOWHERE)
    return loss, known


def _forget_below_(logits: Tensor, least: Tensor) -> None:
    """Set logits below the least of their row to minus infinity; NaN stays."""
    size = -(-len(logits) // MASKS)
    for some, floor in zip(logits.split(size), least[:, None].split(size), strict=True):
        some.masked_fill_(some < floor, -torch.inf)


def _empty_losses(hidden: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Known]:
    """The loss of each target, and what else is known of it, without numbers."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    loss = hidden.new_empty(target.shape, dtype=dtype)
    count = 2 if options.scale is None else 3
    known = Known(target, *(loss.new_empty(target.shape[:1]) for _ in range(count)))
    least = None if options.top_k is None else hidden.new_empty(target.shape[:1])
    return loss, known._replace(least=least)


def _reduced(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    reduction: Reduction,
    *how: Any,
) -> list[Tensor | None]:
    """Compute (loss, weight of each token, dhidden, dweight): this rank's terms of gradients of the sum.

    how: the options, split and strategy
    """
    options, tp, matmul = _unpacked(how)
    target = sharded_loss(options, weight.shape[0], tp).counted(target)
    hidden = tp.gather(options.op, "hidden", hidden).all()
    gradients = PartialGradients(hidden, weight, needs_dhidden, needs_dweight, tp, matmul)
    wanted = gradients if needs_dhidden or needs_dweight else None
    with reuse_quantized_weights():  # one for all chunks
        loss, *_ = _losses_by_chunk(options, hidden, weight, target, wanted, tp, matmul)
    tokens = (target != IGNORED).sum() if reduction == "mean" else torch.ones((), device=target.device)
    share = tokens.clamp_min(1).to(loss.dtype).reciprocal()  # without tokens the loss is 0, and not NaN
    return [loss.sum() * share, share, gradients.dhidden, gradients.dweight]


def _unpacked(how: Sequence[Any]) -> How:
    *options, tp, matmul = how
    return LossOptions(*options), tp, matmul


def _reduced_shape(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    needs_dhidden: bool,
    needs_dweight: bool,
    *how: Any,
) -> list[Tensor | None]:
    *_, tp, _ = how
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    dhidden = hidden.new_empty(target.shape[0], hidden.shape[1], dtype=terms_dtype(hidden.dtype, tp))
    return [
        loss,
        torch.empty_like(loss),
        dhidden if needs_dhidden else None,
        torch.empty_like(weight, dtype=loss.dtype) if needs_dweight else None,
    ]


def _scaled(
    scale: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    hidden_dtype: torch.dtype,
    dtype: torch.dtype,
    op: str,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor | None]:
    """Scale gradients by that of the loss; fp16 holds them before the division by tokens, not after."""
    return [
        None if dhidden is None else sum_over_ranks(dhidden, scale, hidden_dtype, op, tp),
        None if dweight is None else (dweight * scale).to(dtype),
    ]


def _scaled_shape(
    scale: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    hidden_dtype: torch.dtype,
    dtype: torch.dtype,
    op: str,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor | None]:
    return [
        None
        if dhidden is None
        else dhidden.new_empty(dhidden.shape[0] // tp.token_shards, dhidden.shape[1], dtype=hidden_dtype),
        None if dweight is None else torch.empty_like(dweight, dtype=dtype),
    ]


def _token_losses(hidden: Tensor, weight: Tensor, target: Tensor, *how: Any) -> list[Tensor | None]:
    """Compute the loss of each target, and what is in `Known`. how: as of `_reduced`"""
    options, tp, matmul = _unpacked(how)
    target = sharded_loss(options, weight.shape[0], tp).counted(target)
    hidden = tp.gather(options.op, "hidden", hidden).all()
    with reuse_quantized_weights():  # one for all chunks
        loss, known = _losses_by_chunk(options, hidden, weight, target, None, tp, matmul)
    return [loss, *known]


def _token_losses_shape(hidden: Tensor, weight: Tensor, target: Tensor, *how: Any) -> list[Tensor | None]:
    options, _, _ = _unpacked(how)
    loss, known = _empty_losses(hidden, torch.empty_like(target), options)
    return [loss, *known]


def _token_gradients(
    dloss: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    mean: Tensor | None,
    least: Tensor | None,
    needs_dhidden: bool,
    needs_dweight: bool,
    dtype: torch.dtype,
    *how: Any,
) -> list[Tensor | None]:
    """Compute gradients from those of each target's loss and each token's entropy; logits are computed again.

    target, maximum, total, mean, least: as in `Known`; dtype: of dweight; how: as of `_reduced`
    """
    (options, tp, matmul), known = _unpacked(how), Known(target, maximum, total, mean, least)
    losses = sharded_loss(options, weight.shape[0], tp)
    hidden = tp.gather(options.op, "hidden", hidden).all()
    gradients = PartialGradients(hidden, weight, needs_dhidden, needs_dweight, tp, matmul)
    if options.top_k is not None:
        dloss = dloss.masked_fill(known.target == NOWHERE, 0)
    with reuse_quantized_weights():  # one for all chunks
        for rows, logits in _logits_of_chunks(hidden, weight, options, tp, matmul):
            if known.least is not None:
                _forget_below_(logits, known.least[rows])
            given = dloss[rows], None if dentropy is None else dentropy[rows]
            gradients.add(rows, losses.gradient(logits, known.of(rows), *given, in_place=True))
            del logits
    dhidden, dweight = gradients.dhidden, gradients.dweight
    return [
        None if dhidden is None else sum_over_ranks(dhidden, None, weight.dtype, options.op, tp),
        None if dweight is None else dweight.to(dtype),
    ]


def _token_gradients_shape(
    dloss: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    mean: Tensor | None,
    least: Tensor | None,
    needs_dhidden: bool,
    needs_dweight: bool,
    dtype: torch.dtype,
    *_: Any,
) -> list[Tensor | None]:
    return [
        hidden.new_empty(hidden.shape) if needs_dhidden else None,
        weight.new_empty(weight.shape, dtype=dtype) if needs_dweight else None,
    ]


_TENSORS = "Tensor hidden, Tensor weight, Tensor target"
_NEEDS = "bool needs_dhidden, bool needs_dweight"
_OPTIONS = (
    "str op, SymInt? vocab_size, float label_smoothing, int ignore_index, float? scale, int? chunk_tokens, "
    "int? top_k"
)
reduced_loss = SplitOperator(OP, f"{_TENSORS}, {_NEEDS}, str reduction, {_OPTIONS}", _reduced, _reduced_shape)
reduced_gradients = SplitOperator(
    f"{OP}_backward",
    "Tensor scale, Tensor? dhidden, Tensor? dweight, ScalarType hidden_dtype, ScalarType dtype, str op",
    _scaled,
    _scaled_shape,
)
token_losses = SplitOperator(
    "linear_token_losses", f"{_TENSORS}, {_OPTIONS}", _token_losses, _token_losses_shape
)
token_gradients = SplitOperator(
    "linear_token_losses_backward",
    f"Tensor dloss, Tensor? dentropy, {_TENSORS}, Tensor maximum, Tensor total, Tensor? mean, "
    f"Tensor? least, {_NEEDS}, ScalarType dtype, {_OPTIONS}",
    _token_gradients,
    _token_gradients_shape,
)
