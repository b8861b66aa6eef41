"""Cross-entropy of logits whose vocabulary is sharded over ranks; no rank ever holds a full row.

R ranks, T tokens, K ids, V columns a rank:

    logits_shard   (T, V)    our columns            target, loss   (T,)    the same on all ranks

    local      maximum, Σ exp(x - maximum), x[target], Σ x     one pass over the logits
    gather     these four of all ranks, 16 bytes a token and rank: the only communication
    loss       -Σ q log p,  q = 1 - s on the target, and s / K on every id;  s = label_smoothing K / (K - 1)
    backward   dlogits_shard = dloss (p - q)                   one pass, no communication

With a `scale` logits are multiplied by it first, and a fifth number, Σ exp(x - maximum) (x - maximum), in the
place of Σ x, gives the entropy of p. Several targets of one row share its pass: each is one number more.

All is in fp32 or wider, also the loss. K counts ids and not padding, whose logits count for nothing and whose
gradient is zero. As all ranks combine the same numbers in the same order, they have the same bits.

Saved for backward: logits_shard, and three numbers a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.dispatch import vocabulary
from tpkernels.dispatch.products import sums_dtype
from tpkernels.kernels.reference import FLOOR, column_of
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, computed, is_torchs, tokens_of
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.parallel import SplitOperator, compare_request, split_of
from tpkernels.ops.vocab.vocabulary import (
    VocabSegment,
    VocabShard,
    require_ids,
    require_in_vocabulary,
    require_logits,
    vocab_shard,
)

OP = "vocab_cross_entropy"
IN_CACHE = 2**18  # logits: what lies in a cache from call to call is quicker, but calls take time, too
IGNORED = -1  # what an ignored target is from here on, whatever the caller calls it
NOWHERE = 2**31 - 1  # a target that counts, and that no rank has


def vocab_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    group: ProcessGroup,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    tp_invariant: int | None = None,
) -> Tensor:
    """Compute the loss of each token, as `F.cross_entropy(..., reduction="none")` of the full logits.

    logits_shard: (..., columns of this rank), the same number on every rank
    target: (...) ids, the same on all ranks
    label_smoothing: the probability that is moved from the target to the other ids
    ignore_index: a target whose loss is zero
    vocab_size: of the full vocabulary, if columns past it are padding
    overwrite_logits: let backward write the gradient into the memory of the logits (torch.compile plans
        memory itself, and keeps them)
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    returns: (...), in fp32 or wider
    """
    tp = split_of(OP, group, segments=tp_invariant)
    with tp.call:
        require_logits(OP, logits_shard)
        *leading, width = logits_shard.shape
        if list(target.shape) != leading:
            raise ValueError(
                f"{OP}: expected a target for each row of logits_shard {tuple(logits_shard.shape)}, got "
                f"{tuple(target.shape)}"
            )
        options = label_smoothing, ignore_index, vocab_size
        compare_request(OP, tp, logits_shard, options=options)
        loss_options = LossOptions(OP, vocab_size, label_smoothing, ignore_index)
        sharded_loss(loss_options, width, tp)  # raises if the options are wrong
        require_ids(OP, "target", target, logits_shard)
        if overwrite_logits and not torch.compiler.is_compiling():  # compiled code overwrites nothing
            _require_disposable(logits_shard)
        tokens, targets = tokens_of(logits_shard), target.reshape(-1)
        loss: Tensor = computed(_VocabCrossEntropy, tokens, targets, loss_options, tp, overwrite_logits)
    return loss if target.ndim == 1 else loss.view(target.shape)


def _require_disposable(logits: Tensor) -> None:
    """Raise if logits are a leaf, or have elements that share memory."""
    if logits.is_leaf and logits.requires_grad:
        raise ValueError(
            f"{OP}: expected no leaf with overwrite_logits: its gradient would lie in its own memory; pass "
            "what a layer computed, or leave overwrite_logits out"
        )
    if torch._debug_has_internal_overlap(logits) == 1:
        raise ValueError(
            f"{OP}: expected logits with memory of their own for each element with overwrite_logits, got "
            f"strides {logits.stride()} for shape {tuple(logits.shape)}; clone the expanded tensor"
        )


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        target: Tensor,
        options: LossOptions,
        tp: TensorParallel,
        overwrite_logits: bool,
    ) -> Tensor:
        ctx.options, ctx.tp, ctx.overwrite = options, tp, overwrite_logits
        loss, *saved = _token_losses(logits, target, *options[:4], tp=tp, matmul=PLAIN)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, *saved)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def spmd_typecheck(*, logits: Tensor, target: Tensor, tp: TensorParallel) -> spmd_rules.Typed:
        return spmd_rules.losses(logits, target, tp.group)

    @staticmethod
    @first_order(OP)
    def backward(ctx: Context, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, maximum, total = ctx.saved_tensors
        if ctx.overwrite and not torch.compiler.is_compiling():
            losses = sharded_loss(ctx.options, logits.shape[1], ctx.tp)
            with ctx.tp.call:
                dlogits = losses.gradient(logits, Known(target, maximum, total), dloss, in_place=True)
            increment_version(logits)  # autograd raises if anything else saved them for its backward
        else:
            arguments = logits, target, maximum, total, dloss, *ctx.options[:4]
            (dlogits,) = _logits_gradient(*arguments, tp=ctx.tp, matmul=PLAIN)
        return dlogits, None, None, None, None


class LossOptions(NamedTuple):
    """The arguments of a loss, without its tensors.

    op: whose they are, for errors
    scale: of logits, above 0; given, entropies are computed, too
    top_k: fewer than there are ids: probabilities are those of the so many largest logits
    """

    op: str
    vocab_size: int | None
    label_smoothing: float
    ignore_index: int
    scale: float | None = None
    chunk_tokens: int | None = None
    top_k: int | None = None


class Known(NamedTuple):
    """What forward knows of rows, and backward needs: of each target or of each row, over all ranks.

    target: (rows,), or (rows, n), with ignored ones as IGNORED
    maximum, total: (rows,), as in `softmax_statistics`
    mean: (rows,) of x - maximum, with the probabilities p as weights; None without a scale
    least: (rows,), the least logit that top_k keeps; None without it
    """

    target: Tensor
    maximum: Tensor
    total: Tensor
    mean: Tensor | None = None
    least: Tensor | None = None

    def of(self, rows: slice) -> Known:
        return Known(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]

    @property
    def entropy(self) -> Tensor | None:
        """(rows,): 0 where all targets are ignored."""
        if self.mean is None:
            return None
        return (self.total.log() - self.mean).masked_fill(row_targets(self.target) == IGNORED, 0)


@dataclass(frozen=True)
class ShardedLoss:
    """Losses of rows of logits over all ranks, and the gradients of this rank's columns."""

    op: str
    shard: VocabShard
    label_smoothing: float
    ignore_index: int
    scale: float | None

    @property
    def smoothing(self) -> float:
        """Label smoothing as in Megatron, where the K - 1 other ids alone share it."""
        ids = self.shard.size
        return self.label_smoothing * ids / (ids - 1) if self.label_smoothing else 0.0

    def counted(self, target: Tensor) -> Tensor:
        """Replace ignored targets by IGNORED; raise if a target is no id."""
        all_inside = require_in_vocabulary(self.op, "target", target, self.shard, self.ignore_index)
        if all_inside and not 0 <= self.ignore_index < self.shard.size:
            return target.clone()  # an operator gives back none of its inputs
        return torch.where(target == self.ignore_index, IGNORED, target)

    def of_rows(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Known]:
        """Compute the loss of each target. target: (rows,), or (rows, n): several of each row"""
        shard, s, scale = self.shard, self.smoothing, self.scale
        if self._is_plain(logits, target):
            loss, maximum, total = _of_full_rows(logits, target, in_place=False)
            return loss, Known(target, maximum, total)
        fourth = bool(s) or scale is not None  # an unsmoothed loss needs no Σ x
        found = [self._statistics(part, part.of(logits, 1), target, fourth) for part in shard.segments]
        ours = found[0] if len(found) == 1 else torch.cat(found)
        what = f"statistics (label_smoothing {s:g}, ignore_index {self.ignore_index}, {shard.size} ids"
        what += ")" if scale is None else f", scale {scale:g})"
        everybody = shard.tp.gather_numbers(self.op, what, ours)
        parts, targets = len(found) * shard.tp.ranks, 1 if target.ndim == 1 else target.shape[1]
        everybody = everybody.view(parts, 2 + targets + fourth, len(target))
        (maxima, totals), picked = everybody[:, :2].unbind(1), everybody[:, 2 : 2 + targets]
        maximum = maxima.amax(0)
        total = (totals * (maxima - maximum).exp()).sum(0)
        log_total = total.log()
        loss = log_total + (maximum - picked.sum(0))  # (targets, rows)
        mean = None
        if scale is not None:
            shift = (maxima - maximum).clamp_min(FLOOR)
            mean = ((everybody[:, -1] + totals * shift) * shift.exp()).sum(0) / total
        elif s:
            loss = (1 - s) * loss + s * (log_total + (maximum - everybody[:, -1].sum(0) / shard.size))
        loss = loss.t().reshape(target.shape).masked_fill(target == IGNORED, 0)
        return loss, Known(target, maximum, total, mean)

    def _statistics(self, part: VocabSegment, x: Tensor, target: Tensor, fourth: bool) -> Tensor:
        """maximum, total, the logit of each target and what else is needed of each row: (numbers, rows)"""
        where = part.columns, part.first_id
        found = vocabulary.softmax_statistics(x, row_targets(target), *where, self.scale)
        if target.ndim == 1:
            return found[: 3 + fourth]
        picked = found.new_zeros(target.shape)
        if part.columns:
            column, ours = column_of(target, *where)
            picked = torch.where(ours, x.gather(1, column).to(picked.dtype) * (self.scale or 1.0), picked)
        return torch.cat([found[:2], picked.t(), found[3 : 3 + fourth]])

    def with_gradient(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Known]:
        """The same; writes the gradient of the sum of losses into the memory of the logits."""
        if self._is_plain(logits, target) and logits.dtype == sums_dtype(logits.dtype):
            loss, maximum, total = _of_full_rows(logits, target, in_place=True)
            return loss, Known(target, maximum, total)
        loss, known = self.of_rows(logits, target)
        self.gradient(logits, known, torch.ones_like(loss), in_place=True)
        return loss, known

    def _is_plain(self, logits: Tensor, target: Tensor) -> bool:
        """Whether one rank has all columns, none is padding, and torch computes a loss and nothing else."""
        alone = self.shard.tp.ranks == 1 and not (self.label_smoothing or self.shard.tp.segments)
        if self.scale is not None or target.ndim > 1:
            return False
        return alone and 0 < self.shard.size == logits.shape[1] and is_torchs(logits)

    def gradient(
        self,
        logits: Tensor,
        known: Known,
        dloss: Tensor,
        dentropy: Tensor | None = None,
        *,
        in_place: bool,
    ) -> Tensor:
        """Compute the gradient of the logits; in their memory if `in_place`."""
        target, maximum, total, mean, _ = known
        size, s, dloss = self.shard.size, self.smoothing, dloss.to(total.dtype).contiguous()
        if self._is_plain(logits, target) and logits.dtype == total.dtype:
            out = logits if in_place else torch.empty_like(logits)
            return _gradient_of_full_rows(out, logits, target, maximum, total, dloss)
        if self.scale is not None:
            dloss = dloss * self.scale
            dentropy = torch.zeros_like(total) if dentropy is None else dentropy.to(total.dtype) * self.scale
        else:
            dentropy = None
        of_targets = dloss
        if target.ndim > 1:
            of_targets = dloss.masked_fill(target == IGNORED, 0)
            dloss = of_targets.sum(1)
        rows, entropy = row_targets(target), (self.scale, mean, dentropy)

        def of_columns(x: Tensor, columns: int, first_id: int, in_place: bool) -> Tensor:
            return vocabulary.cross_entropy_grad(
                *(x, rows, maximum, total, dloss), columns, first_id, 1 - s, s / size, in_place, *entropy
            )

        def of_part(part: VocabSegment, x: Tensor, in_place: bool) -> Tensor:
            if target.ndim == 1 or not part.columns:
                return of_columns(x, part.columns, part.first_id, in_place)
            # rounded once: the gradient at targets is computed beside, in the dtype of sums
            column, _ = column_of(target, part.columns, part.first_id)
            near = x.gather(1, column).to(total.dtype)
            dx = of_columns(x, part.columns, part.first_id, in_place)
            near = of_columns(near, near.shape[1], 0, True)
            near -= _sum_of_equal(target, column + part.first_id, of_targets, x.shape[1])
            return dx.scatter_(1, column, near.to(dx.dtype))

        if not self.shard.tp.segments:
            (whole,) = self.shard.segments
            return of_part(whole, logits, in_place)
        dlogits = logits if in_place else torch.empty_like(logits)
        for part in self.shard.segments:
            part.view_of(dlogits, 1).copy_(of_part(part, part.of(logits, 1), False))
        return dlogits


def row_targets(target: Tensor) -> Tensor:
    """(rows,): the target of each row, or for several of a row NOWHERE, or IGNORED if all are."""
    if target.ndim == 1:
        return target
    if not target.shape[1]:  # none is ignored
        return target.new_full(target.shape[:1], NOWHERE)
    return torch.where((target == IGNORED).all(1), IGNORED, NOWHERE)


def _sum_of_equal(target: Tensor, ids: Tensor, values: Tensor, width: int) -> Tensor:
    """(rows, n): for each id the sum of the values of targets that are equal to it; n² comparisons.

    width: how many numbers a row may take at a time
    """
    size, found = max(1, width // (4 * max(1, ids.shape[1]))), torch.zeros_like(values)
    for start in range(0, target.shape[1], size):
        some = slice(start, start + size)
        equal = target[:, None, some] == ids[:, :, None]
        found += torch.where(equal, values[:, None, some], 0).sum(2)
    return found


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Split tensors into as many rows as the cache holds of the first."""
    rows = max(1, IN_CACHE // tensors[0].shape[1])
    if rows >= len(tensors[0]):
        yield list(tensors)
        return
    for start in range(0, len(tensors[0]), rows):
        yield [tensor[start : start + rows] for tensor in tensors]


def _of_full_rows(logits: Tensor, target: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (loss, maximum, total) of each row.

    in_place: exponentials are computed where the logits are, and become the gradient of the sum of losses
    """
    index, dtype = target.long().clamp_min(0)[:, None], sums_dtype(logits.dtype)
    picked = logits.gather(1, index)
    maxima, totals, scratch = [], [], None
    for (x,) in _blocks(logits):
        maxima.append(x.amax(1, keepdim=True).to(dtype))
        if scratch is None and not in_place:
            scratch = torch.empty_like(x, dtype=dtype)
        out = x if scratch is None else scratch[: len(x)]
        totals.append(torch.sub(x, maxima[-1], out=out).exp_().sum(1, keepdim=True))
    maximum, total = (each[0] if len(each) == 1 else torch.cat(each) for each in (maxima, totals))
    if in_place:
        _subtract_targets_(logits.mul_(total.reciprocal()), target, index, torch.ones_like(total))
    loss = (total.log() + (maximum - picked))[:, 0].masked_fill(target == IGNORED, 0)
    return loss, maximum[:, 0], total[:, 0]


def _gradient_of_full_rows(
    dlogits: Tensor, logits: Tensor, target: Tensor, maximum: Tensor, total: Tensor, dloss: Tensor
) -> Tensor:
    """Write the gradient of the logits into dlogits, which may be the logits, and return it."""
    for out, x, most, scale in _blocks(dlogits, logits, maximum[:, None], (dloss / total)[:, None]):
        torch.sub(x, most, out=out).exp_().mul_(scale)
    index = target.long().clamp(0, logits.shape[1] - 1)  # of IGNORED and NOWHERE, any
    return _subtract_targets_(dlogits, target, index[:, None], dloss[:, None])


def _subtract_targets_(dlogits: Tensor, target: Tensor, index: Tensor, dloss: Tensor) -> Tensor:
    """From dloss p to the gradient; that of ignored rows, whose logits may be anything, is zero."""
    dlogits.scatter_add_(1, index, -dloss)
    ignored = (target == IGNORED).nonzero()
    return dlogits.index_fill_(0, ignored[:, 0], 0) if len(ignored) else dlogits


def sharded_loss(options: LossOptions, width: int, tp: TensorParallel) -> ShardedLoss:
    """The loss of these options, checked. width: columns of each rank"""
    op = options.op
    shard = vocab_shard(op, tp, width, options.vocab_size)
    if not 0 <= options.label_smoothing < 1:
        raise ValueError(
            f"{op}: expected label_smoothing from 0 to less than 1, got {options.label_smoothing}"
        )
    if options.label_smoothing and shard.size == 1:
        raise ValueError(f"{op}: expected no label_smoothing with one id: there is no other to give it to")
    return ShardedLoss(op, shard, options.label_smoothing, options.ignore_index, options.scale)


def _losses(
    logits: Tensor,
    target: Tensor,
    op: str,
    vocab_size: int | None,
    label_smoothing: float,
    ignore_index: int,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor]:
    """Compute (loss, target, maximum, total) of each row, with ignored targets as IGNORED."""
    losses = sharded_loss(LossOptions(op, vocab_size, label_smoothing, ignore_index), logits.shape[1], tp)
    loss, known = losses.of_rows(logits, losses.counted(target))
    return [loss, known.target, known.maximum, known.total]


def _losses_shape(logits: Tensor, target: Tensor, *_: object) -> list[Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
    return [loss, torch.empty_like(target), torch.empty_like(loss), torch.empty_like(loss)]


def _gradient(
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    total: Tensor,
    dloss: Tensor,
    op: str,
    vocab_size: int | None,
    label_smoothing: float,
    ignore_index: int,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor]:
    losses = sharded_loss(LossOptions(op, vocab_size, label_smoothing, ignore_index), logits.shape[1], tp)
    return [losses.gradient(logits, Known(target, maximum, total), dloss, in_place=False)]


def _gradient_shape(logits: Tensor, *_: object) -> list[Tensor]:
    return [logits.new_empty(logits.shape)]


_OPTIONS = "str op, SymInt? vocab_size, float label_smoothing, int ignore_index"
_token_losses = SplitOperator(OP, f"Tensor logits, Tensor target, {_OPTIONS}", _losses, _losses_shape)
_logits_gradient = SplitOperator(
    f"{OP}_backward",
    f"Tensor logits, Tensor target, Tensor maximum, Tensor total, Tensor dloss, {_OPTIONS}",
    _gradient,
    _gradient_shape,
)
