"""Losses of a head by chunks of tokens, their gradients, and the operators of `linear_cross_entropy`.

The legend is that of `linear_cross_entropy`; hidden is a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Gather, Terms
from tpkernels.dispatch.products import sums_dtype
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.matmul import Plain
from tpkernels.ops.quantized.weights import reuse_quantized_weights
from tpkernels.ops.tensor_parallel.parallel import SplitOperator
from tpkernels.ops.vocab.cross_entropy import (
    IGNORED,
    KNOWN,
    NOWHERE,
    OPTIONS,
    How,
    Known,
    ShardedLoss,
    empty_losses,
    sharded_loss,
    unpacked,
    unpacked_known,
)
from tpkernels.ops.vocab.sampling import kth_largest

Reduction = Literal["mean", "sum", "none"]
LEAST_TOKENS = 128  # in a chunk by default; chosen without measuring
MASKS = 16  # in which the tokens of a chunk are masked, so that a mask takes little beside its logits


class PartialGradients:
    """Accumulates this rank's terms of the gradients over chunks; None for those that are not needed."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        needs_dhidden: bool,
        needs_dweight: bool,
        needs_dbias: bool,
        tp: TensorParallel,
        matmul: Plain,
    ) -> None:
        self._hidden, self._weight, self._matmul = hidden, weight, matmul
        wide = sums_dtype(weight.dtype)
        # contiguous, whatever hidden is: kernels write rows of it
        self.dhidden = (
            hidden.new_empty(hidden.shape, dtype=terms_dtype(hidden.dtype, tp)) if needs_dhidden else None
        )
        self.dweight = torch.zeros_like(weight, dtype=wide) if needs_dweight else None
        self.dbias = weight.new_zeros(weight.shape[0], dtype=wide) if needs_dbias else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        matmul = self._matmul
        if self.dhidden is not None:
            pairs = [(matmul.pack(dlogits, "dy"), self._weight)]
            self.dhidden[rows] = matmul.terms(pairs, False, self.dhidden.dtype).at_once()
        if self.dweight is not None:
            hidden = self._hidden[rows]
            matmul.wgrad(dlogits, hidden, self.dweight, split="dy")
        if self.dbias is not None:
            self.dbias += matmul.bias_grad(as_dtype(dlogits, self.dbias.dtype), split=True)


def terms_dtype(dtype: torch.dtype, tp: TensorParallel) -> torch.dtype:
    """The dtype of a rank's terms of a sum: rounded, or with TP-invariance as wide as the sum."""
    return sums_dtype(dtype) if tp.segments else dtype


def sum_over_ranks(
    dhidden: Tensor, scale: Tensor | None, dtype: torch.dtype, op: str, tp: TensorParallel
) -> Tensor:
    """Sum dhidden over ranks, times scale; return all of it, or this rank's tokens."""
    term_scale = None if tp.segments else scale
    terms = Terms(
        dhidden.shape[0],
        dhidden.shape[1],
        dhidden,
        lambda rows: dhidden[rows] if term_scale is None else dhidden[rows] * term_scale,
        tree=tp.segments > 0,
    )
    total = tp.reduce(f"{op} backward", terms).wait()
    if scale is not None and tp.segments:
        total = total * scale
    return as_dtype(total, dtype)


def _logits_of_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, how: How, *, slopes: bool
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield rows, their logits and slopes; the caller frees these before the next are computed.

    slopes: the derivative of logits by what a softcap bounds; None without a softcap
    By default a chunk of logits has as many elements as all of hidden; with TP-invariance those of all ranks.
    """
    options, tp, matmul = how
    width = weight.shape[0] * (tp.ranks if tp.segments else 1)
    size = options.chunk_tokens or max(LEAST_TOKENS, -(-hidden.numel() // width))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        # which no name here holds
        yield rows, *_bounded(_logits(hidden[rows], weight, bias, matmul), options.softcap, slopes)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, matmul: Plain) -> Tensor:
    (logits,) = matmul.product(Gather(matmul.pack(hidden)), [weight], [bias], dtype=hidden.dtype)
    return logits


def _bounded(z: Tensor, softcap: float | None, slopes: bool) -> tuple[Tensor, Tensor | None]:
    """softcap tanh(z / softcap) and its derivative by z, in fp32 or wider; z as it is without a softcap."""
    if softcap is None:
        return z, None
    bounded = z.to(sums_dtype(z.dtype)).div_(softcap).tanh_()
    slope = bounded.square().neg_().add_(1) if slopes else None
    return bounded.mul_(softcap), slope


def _of_unbounded(dlogits: Tensor, slope: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gradient of z from that of `_bounded(z)`, in whose place it may be."""
    return dlogits if slope is None else dlogits.mul_(slope).to(dtype)


def _losses_by_chunk(
    losses: ShardedLoss,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    gradients: PartialGradients | None,
    how: How,
) -> tuple[Tensor, Known]:
    """Compute the loss of each target; add gradients of the sum of losses to `gradients`."""
    options = losses.options
    loss, known = empty_losses(hidden, target, options)
    chunks = _logits_of_chunks(hidden, weight, bias, how, slopes=gradients is not None)
    for rows, logits, slope in chunks:
        if options.top_k is not None and known.least is not None:
            known.least[rows] = kth_largest(options.op, logits, losses.shard, options.top_k)
            _forget_below_(logits, known.least[rows])
        of_chunk = losses.of_rows if gradients is None else losses.with_gradient
        loss[rows], found = of_chunk(logits, target[rows])
        for all_rows, some in zip(known[1:], found[1:], strict=True):
            if all_rows is not None and some is not None:
                all_rows[rows] = some
        if gradients is not None:
            gradients.add(rows, _of_unbounded(logits, slope, hidden.dtype))
        del logits, slope
    if options.top_k is not None:  # a target that was not kept: its gradient is that of a constant
        target.masked_fill_(loss == torch.inf, NOWHERE)
    return loss, known


def _forget_below_(logits: Tensor, least: Tensor) -> None:
    """Set logits below the least of their row to minus infinity; NaN stays."""
    size = -(-len(logits) // MASKS)
    for some, floor in zip(logits.split(size), least[:, None].split(size), strict=True):
        some.masked_fill_(some < floor, -torch.inf)


def _reduced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    needs_dhidden: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    reduction: Reduction,
    *flat: Any,
) -> list[Tensor | None]:
    """Compute this rank's terms of gradients of the sum of losses.

    flat: the options, split and strategy
    returns: the loss, the weight of each token, dhidden, dweight, dbias; for metrics the squares that the
        z-loss weighs, and the accuracy
    """
    how = options, tp, matmul = unpacked(flat)
    losses = sharded_loss(options, weight.shape[0], tp, class_weight)
    target = losses.counted(target)
    wide, metrics = sums_dtype(hidden.dtype), options.metrics
    tokens = (target != IGNORED).sum()
    total = at_least_one = tokens.clamp_min(1).to(wide)  # without tokens the loss is 0, and not NaN
    if reduction == "sum":
        total = torch.ones_like(total)
    elif class_weight is not None:
        total = torch.where(tokens > 0, losses.weights_of(target).sum(dtype=wide), total)  # type: ignore[union-attr]
        losses = replace(losses, z_loss=options.z_loss * (total / at_least_one))
    hidden = tp.gather(options.op, "hidden", hidden).all()
    needs = needs_dhidden, needs_dweight, needs_dbias
    gradients = PartialGradients(hidden, weight, *needs, tp, matmul)
    wanted = gradients if any(needs) else None
    with reuse_quantized_weights():  # one for all chunks
        loss, known = _losses_by_chunk(losses, hidden, weight, bias, target, wanted, how)
    share = total.reciprocal()
    results = [loss.sum() * share, share, gradients.dhidden, gradients.dweight, gradients.dbias]
    if not metrics:
        return [*results, None, None]
    assert known.correct is not None
    squared = known.squared_log_sum.sum() / (total if reduction == "sum" else at_least_one)
    return [*results, squared, known.correct.sum() / at_least_one]


def _reduced_shape(*args: Any) -> list[Tensor | None]:
    hidden, weight, _, target, _, needs_dhidden, needs_dweight, needs_dbias, _, *flat = args
    options, tp, _ = unpacked(flat)
    loss = hidden.new_empty((), dtype=sums_dtype(hidden.dtype))
    dhidden = hidden.new_empty(target.shape[0], hidden.shape[1], dtype=terms_dtype(hidden.dtype, tp))
    return [
        loss,
        torch.empty_like(loss),
        dhidden if needs_dhidden else None,
        torch.empty_like(weight, dtype=loss.dtype) if needs_dweight else None,
        loss.new_empty(weight.shape[0]) if needs_dbias else None,
        *(torch.empty_like(loss) if options.metrics else None for _ in range(2)),
    ]


def _scaled_sum(
    dhidden: Tensor, scale: Tensor, dtype: torch.dtype, op: str, tp: TensorParallel, _: Plain
) -> list[Tensor]:
    return [sum_over_ranks(dhidden, scale, dtype, op, tp)]


def _scaled_sum_shape(
    dhidden: Tensor, scale: Tensor, dtype: torch.dtype, op: str, tp: TensorParallel, _: Plain
) -> list[Tensor]:
    return [dhidden.new_empty(dhidden.shape[0] // tp.token_shards, dhidden.shape[1], dtype=dtype)]


def _token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    *flat: Any,
) -> list[Tensor | None]:
    """Compute the loss of each target, and what is in `Known`. flat: as of `_reduced`"""
    how = options, tp, _ = unpacked(flat)
    losses = sharded_loss(options, weight.shape[0], tp, class_weight)
    target = losses.counted(target)
    hidden = tp.gather(options.op, "hidden", hidden).all()
    with reuse_quantized_weights():  # one for all chunks
        loss, known = _losses_by_chunk(losses, hidden, weight, bias, target, None, how)
    return [loss, *known]


def _token_losses_shape(*args: Any) -> list[Tensor | None]:
    hidden, _, _, target, _, *flat = args
    options, _, _ = unpacked(flat)
    loss, known = empty_losses(hidden, torch.empty_like(target), options)
    return [loss, *known]


def _token_gradients(
    dloss: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    needs_dhidden: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    *known_and_how: Any,
) -> list[Tensor | None]:
    """Compute gradients from those of each target's loss and each token's entropy; logits are computed again.

    known_and_how: what is in `Known`, and the options, split and strategy
    """
    known, how = unpacked_known(known_and_how)
    options, tp, matmul = how
    losses = sharded_loss(options, weight.shape[0], tp, class_weight)
    hidden = tp.gather(options.op, "hidden", hidden).all()
    gradients = PartialGradients(hidden, weight, needs_dhidden, needs_dweight, needs_dbias, tp, matmul)
    if options.top_k is not None:
        dloss = dloss.masked_fill(known.target == NOWHERE, 0)
    with reuse_quantized_weights():  # one for all chunks
        for rows, logits, slope in _logits_of_chunks(hidden, weight, bias, how, slopes=True):
            if known.least is not None:
                _forget_below_(logits, known.least[rows])
            given = dloss[rows], None if dentropy is None else dentropy[rows]
            dlogits = losses.gradient(logits, known.of(rows), *given, in_place=True)
            gradients.add(rows, _of_unbounded(dlogits, slope, hidden.dtype))
            del logits, dlogits, slope
    dhidden = gradients.dhidden
    if dhidden is not None:
        dhidden = sum_over_ranks(dhidden, None, weight.dtype, options.op, tp)
    return [dhidden, gradients.dweight, gradients.dbias]


def _token_gradients_shape(*args: Any) -> list[Tensor | None]:
    _, _, hidden, weight, _, _, needs_dhidden, needs_dweight, needs_dbias, *_ = args
    wide = sums_dtype(weight.dtype)
    return [
        hidden.new_empty(hidden.shape) if needs_dhidden else None,
        torch.empty_like(weight, dtype=wide) if needs_dweight else None,
        weight.new_empty(weight.shape[0], dtype=wide) if needs_dbias else None,
    ]


_HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
_TENSORS = f"{_HEAD}, Tensor target, Tensor? class_weight"
_NEEDS = "bool needs_dhidden, bool needs_dweight, bool needs_dbias"
reduced_loss = SplitOperator(
    "linear_cross_entropy", f"{_TENSORS}, {_NEEDS}, str reduction, {OPTIONS}", _reduced, _reduced_shape
)
scaled_sum = SplitOperator(
    "linear_cross_entropy_backward",
    "Tensor dhidden, Tensor scale, ScalarType dtype, str op",
    _scaled_sum,
    _scaled_sum_shape,
)
token_losses = SplitOperator(
    "linear_token_losses", f"{_TENSORS}, {OPTIONS}", _token_losses, _token_losses_shape
)
token_gradients = SplitOperator(
    "linear_token_losses_backward",
    f"Tensor dloss, Tensor? dentropy, {_HEAD}, Tensor? class_weight, {_NEEDS}, {KNOWN}, {OPTIONS}",
    _token_gradients,
    _token_gradients_shape,
)
