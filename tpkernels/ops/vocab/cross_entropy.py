"""Cross-entropy of logits whose vocabulary is sharded over ranks; no rank ever holds a full row.

R ranks, T tokens, K ids, V columns a rank:

    logits_shard   (T, V)    our columns            target, loss   (T,)    the same on all ranks

    local      maximum, Σ exp(x - maximum), x[target], Σ x     one pass over the logits
    gather     these four of all ranks, 16 bytes a token and rank: the only communication
    loss       -Σ q log p,  q = 1 - s on the target, and s / K on every id;  s = label_smoothing K / (K - 1)
    backward   dlogits_shard = dloss (p - q)                   one pass, no communication

With class weights w, a z-loss of coefficient c, and log Z = maximum + log Σ exp(x - maximum) over all ranks:

    loss       -Σ q w log p + c (log Z)²
    backward   dlogits_shard = dloss ((Σ q w + 2 c log Z) p - q w)

With a `scale` logits are multiplied by it first, and a fifth number, Σ exp(x - maximum) (x - maximum), in the
place of Σ x, gives the entropy of p. Several targets of one row share its pass: each is one number more.

All is in fp32 or wider, also the loss; a gradient of 16 bits is rounded once. K counts ids and not padding,
whose logits count for nothing and whose gradient is zero. As all ranks combine the same numbers in the same
order, they have the same bits.

Saved for backward: logits_shard, and three numbers a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from tpkernels.ops.inputs import Context, as_dtype, computed, is_torchs, tokens_of
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.parallel import SplitOperator, compare_request, split_of
from tpkernels.ops.vocab.vocabulary import (
    VocabSegment,
    VocabShard,
    require_class_weight,
    require_ids,
    require_in_vocabulary,
    require_logits,
    require_shards,
    vocab_shard,
)

OP = "vocab_cross_entropy"
IN_CACHE = 2**18  # logits: what lies in a cache from call to call is quicker, but calls take time, too
WIDE = 2**22  # logits in fp32 at a time, where a kernel's pass is not all: 16 MiB
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
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    overwrite_logits: bool = False,
    tp_invariant: int | None = None,
) -> Tensor:
    """Compute the loss of each token, as `F.cross_entropy(..., reduction="none")` of the full logits.

    logits_shard: (..., columns of this rank), the same number on every rank
    target: (...) ids, the same on all ranks
    label_smoothing: the probability that is moved from the target to the other ids
    ignore_index: a target whose loss is zero
    vocab_size: of the full vocabulary, if columns past it are padding
    class_weight: (vocab_size,) of all ids, the same on all ranks, without a gradient
    z_loss: coefficient of the squared logarithm of Σ exp(logits), which is added to the loss
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
        options = LossOptions(OP, vocab_size, label_smoothing, ignore_index, z_loss=z_loss)
        compare_request(OP, tp, logits_shard, options=(*options[1:], class_weight is None))
        sharded_loss(options, width, tp, class_weight, logits_shard)  # raises if the options are wrong
        require_ids(OP, "target", target, logits_shard)
        class_weight = in_dtype_of_loss(class_weight, logits_shard)
        if overwrite_logits and not torch.compiler.is_compiling():  # compiled code overwrites nothing
            _require_disposable(logits_shard)
        tokens, targets = tokens_of(logits_shard), target.reshape(-1)
        arguments = tokens, targets, class_weight, options, tp, overwrite_logits
        loss: Tensor = computed(_VocabCrossEntropy, *arguments)
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
        class_weight: Tensor | None,
        options: LossOptions,
        tp: TensorParallel,
        overwrite_logits: bool,
    ) -> Tensor:
        ctx.options, ctx.tp, ctx.overwrite = options, tp, overwrite_logits
        arguments = logits, target, class_weight, *options
        loss, *known = _token_losses(*arguments, tp=tp, matmul=PLAIN, given=options.results)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, class_weight, *known)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def spmd_typecheck(
        *, logits: Tensor, target: Tensor, class_weight: Tensor | None, tp: TensorParallel
    ) -> spmd_rules.Typed:
        return spmd_rules.losses(logits, target, class_weight, tp.group)

    @staticmethod
    @first_order(OP)
    def backward(ctx: Context, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, class_weight, *known = ctx.saved_tensors
        if ctx.overwrite and not torch.compiler.is_compiling():
            losses = sharded_loss(ctx.options, logits.shape[1], ctx.tp, class_weight)
            with ctx.tp.call:
                dlogits = losses.gradient(logits, Known(*known), dloss, in_place=True)
            increment_version(logits)  # autograd raises if anything else saved them for its backward
        else:
            arguments = logits, dloss, class_weight, *known, *ctx.options
            (dlogits,) = _logits_gradient(*arguments, tp=ctx.tp, matmul=PLAIN)
        return dlogits, *([None] * 5)


class LossOptions(NamedTuple):
    """The arguments of a loss, without its tensors.

    op: whose they are, for errors
    scale: of logits, above 0; given, entropies are computed, too
    top_k: fewer than there are ids: probabilities are those of the so many largest logits
    softcap: bounds logits to softcap tanh(logits / softcap)
    z_loss: coefficient of the squared logarithm of Σ exp(logits)
    metrics: whether the largest logit is the target's is a result, too
    """

    op: str
    vocab_size: int | None
    label_smoothing: float
    ignore_index: int
    scale: float | None = None
    chunk_tokens: int | None = None
    top_k: int | None = None
    softcap: float | None = None
    z_loss: float = 0.0
    metrics: bool = False

    @property
    def results(self) -> tuple[bool, ...]:
        """Which results there are: the loss of each target, and what is in `Known`."""
        return True, True, True, True, self.scale is not None, self.top_k is not None, self.metrics


class Known(NamedTuple):
    """What forward knows of rows, and backward needs: of each target or of each row, over all ranks.

    target: (rows,), or (rows, n), with ignored ones as IGNORED
    maximum, total: (rows,), as in `softmax_statistics`
    mean: (rows,) of x - maximum, with the probabilities p as weights; None without a scale
    least: (rows,), the least logit that top_k keeps; None without it
    correct: (rows,), whether the target has the largest logit, and of equal ones the lowest id; None unless
        asked for; unknown to backward
    """

    target: Tensor
    maximum: Tensor
    total: Tensor
    mean: Tensor | None = None
    least: Tensor | None = None
    correct: Tensor | None = None

    def of(self, rows: slice) -> Known:
        return Known(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]

    @property
    def entropy(self) -> Tensor | None:
        """(rows,): 0 where all targets are ignored."""
        if self.mean is None:
            return None
        return (self.total.log() - self.mean).masked_fill(row_targets(self.target) == IGNORED, 0)

    @property
    def squared_log_sum(self) -> Tensor:
        """(rows,): (log Σ exp(x))², which a z-loss weighs; 0 where the target is ignored."""
        return (self.maximum + self.total.log()).square().masked_fill(self.target == IGNORED, 0)


How = tuple[LossOptions, TensorParallel, Plain]


@dataclass(frozen=True)
class ShardedLoss:
    """Losses of rows of logits over all ranks, and the gradients of this rank's columns."""

    options: LossOptions
    shard: VocabShard
    class_weight: Tensor | None
    z_loss: float | Tensor  # of the options, or relative to other weights of the terms of a loss

    @property
    def is_weighted(self) -> bool:
        """Whether the gradient is more than a multiple of p - q in each row."""
        return self.class_weight is not None or self.options.z_loss > 0

    def weights_of(self, target: Tensor) -> Tensor | float:
        """(rows,): the class weights of targets, those of ignored ones being 0; 1 without class weights."""
        if self.class_weight is None:
            return 1.0
        return self.class_weight[target.long().clamp_min(0)].masked_fill(target == IGNORED, 0)

    @property
    def smoothing(self) -> float:
        """Label smoothing as in Megatron, where the K - 1 other ids alone share it."""
        given, ids = self.options.label_smoothing, self.shard.size
        return given * ids / (ids - 1) if given else 0.0

    def counted(self, target: Tensor) -> Tensor:
        """Replace ignored targets by IGNORED; raise if a target is no id."""
        ignored = self.options.ignore_index
        arguments = target, self.shard, ignored, self.class_weight
        all_inside = require_in_vocabulary(self.options.op, "target", *arguments)
        if all_inside and not 0 <= ignored < self.shard.size:
            return target.clone()  # an operator gives back none of its inputs
        return torch.where(target == ignored, IGNORED, target)

    def of_rows(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Known]:
        """Compute the loss of each target. target: (rows,), or (rows, n): several of each row"""
        (op, _, _, ignored, scale, *_), shard, s = self.options, self.shard, self.smoothing
        if self._is_plain(logits, target):
            loss, maximum, total = _of_full_rows(logits, target, in_place=False)
            return loss, Known(target, maximum, total)
        require_shards(op, logits, shard)
        fourth = bool(s) or scale is not None  # an unsmoothed loss needs no Σ x
        found = [self._statistics(part, part.of(logits), target, fourth) for part in shard.segments]
        ours = found[0] if len(found) == 1 else torch.cat(found)
        what = f"statistics (label_smoothing {s:g}, ignore_index {ignored}, {shard.size} ids"
        what += f", z_loss {self.options.z_loss:g}, weighted" if self.is_weighted else ""
        what += ")" if scale is None else f", scale {scale:g})"
        everybody = shard.tp.gather_numbers(op, what, ours)
        parts, targets = len(found) * shard.tp.ranks, 1 if target.ndim == 1 else target.shape[1]
        everybody = everybody.view(parts, 2 + targets + fourth + self.options.metrics, len(target))
        (maxima, totals), picked = everybody[:, :2].unbind(1), everybody[:, 2 : 2 + targets]
        maximum = maxima.amax(0)
        total = (totals * (maxima - maximum).exp()).sum(0)
        log_total, sums = total.log(), everybody[:, 2 + targets] if fourth else None
        loss = log_total + (maximum - picked.sum(0))  # (targets, rows)
        mean = correct = None
        if scale is not None:
            assert sums is not None
            shift = (maxima - maximum).clamp_min(FLOOR)
            mean = ((sums + totals * shift) * shift.exp()).sum(0) / total
        elif s:
            assert sums is not None
            mean_weight = self._mean_weight
            others = mean_weight * log_total + (mean_weight * maximum - sums.sum(0) / shard.size)
            loss = (1 - s) * self.weights_of(target) * loss + s * others
        elif self.class_weight is not None:
            loss = self.weights_of(target) * loss
        if self.options.z_loss:
            loss = loss + self.z_loss * (maximum + log_total).square()
        if self.options.metrics:  # of equal logits the first rank's, which has the lower ids
            correct = everybody[:, -1].gather(0, maxima.argmax(0, keepdim=True))[0] > 0
        loss = loss.t().reshape(target.shape).masked_fill(target == IGNORED, 0)
        return loss, Known(target, maximum, total, mean, correct=correct)

    @property
    def _mean_weight(self) -> Tensor | float:
        return 1.0 if self.class_weight is None else self.class_weight.sum() / self.shard.size

    def _statistics(self, part: VocabSegment, x: Tensor, target: Tensor, fourth: bool) -> Tensor:
        """maximum, total, the logit of each target and what else is needed of each row: (numbers, rows)"""
        where = part.columns, part.first_id
        scale = self.options.scale
        found = vocabulary.softmax_statistics(x, row_targets(target), *where, scale)
        if target.ndim == 1:
            if fourth and self.class_weight is not None:
                found[3] = self._weighted_sums(part, x, found.dtype)
            if not self.options.metrics:
                return found[: 3 + fourth]
            best = x[:, : part.columns].argmax(1) if part.columns else torch.full_like(target, NOWHERE)
            hit = (best + part.first_id == target).to(found.dtype)
            return torch.cat([found[: 3 + fourth], hit[None]])
        picked = found.new_zeros(target.shape)
        if part.columns:
            column, ours = column_of(target, *where)
            picked = torch.where(ours, x.gather(1, column).to(picked.dtype) * (scale or 1.0), picked)
        return torch.cat([found[:2], picked.t(), found[3 : 3 + fourth]])

    def _weights_in(self, part: VocabSegment) -> Tensor | None:
        """Those of a part's columns that are no padding."""
        weight = self.class_weight
        return None if weight is None else weight[part.first_id : part.first_id + part.columns]

    def _weighted_sums(self, part: VocabSegment, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows,): Σ w x over a part's columns."""
        weight, size = self._weights_in(part), _rows_at_once(x)
        return torch.cat([(some.to(dtype) * weight).sum(1) for some in x[:, : part.columns].split(size)])

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
        (_, _, smoothing, _, scale, *_), tp = self.options, self.shard.tp
        alone = tp.ranks == 1 and 0 < self.shard.size == logits.shape[1] and not tp.segments
        more = smoothing or scale is not None or self.is_weighted or self.options.metrics
        return alone and not more and target.ndim == 1 and is_torchs(logits)

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
        target, maximum, total, mean, *_ = known
        size, s, scale = self.shard.size, self.smoothing, self.options.scale
        on_target, off_target, smoothed = 1 - s, s / size, None
        if self.is_weighted and s and logits.dtype != total.dtype:  # more than the kernel's one rounding
            dlogits, at_once = logits if in_place else torch.empty_like(logits), _rows_at_once(logits)
            for start in range(0, len(logits), at_once):
                some = slice(start, start + at_once)
                given = logits[some].to(total.dtype), known.of(some), dloss[some]
                dlogits[some] = self.gradient(*given, in_place=True)
            return dlogits
        dloss = dloss.to(total.dtype).contiguous()
        if scale is not None:
            dloss = dloss * scale
            dentropy = torch.zeros_like(total) if dentropy is None else dentropy.to(total.dtype) * scale
        of_targets = dloss
        if target.ndim > 1:
            of_targets = dloss.masked_fill(target == IGNORED, 0)
            dloss = of_targets.sum(1)
        rows, entropy, targets = row_targets(target), (scale, mean, dentropy), target
        if self.is_weighted:  # the kernel computes the multiple of p alone
            weights, log_sum = self.weights_of(target), maximum + total.log()
            smoothed = dloss.masked_fill(target == IGNORED, 0) * off_target if s else None
            targets, of_targets = target[:, None], (dloss * (on_target * weights))[:, None]
            dloss = dloss * (on_target * weights + s * self._mean_weight + 2 * self.z_loss * log_sum)
            on_target = off_target = 0.0

        def of_columns(x: Tensor, columns: int, first_id: int, in_place: bool) -> Tensor:
            return vocabulary.cross_entropy_grad(
                *(x, rows, maximum, total, dloss),
                columns,
                first_id,
                on_target,
                off_target,
                in_place,
                *entropy,
            )

        def of_part(part: VocabSegment, x: Tensor, in_place: bool) -> Tensor:
            if targets.ndim == 1 or not part.columns:
                return of_columns(x, part.columns, part.first_id, in_place)
            # rounded once: the gradient at targets is computed beside, in the dtype of sums
            column, _ = column_of(targets, part.columns, part.first_id)
            near = x.gather(1, column).to(total.dtype)
            dx = of_columns(x, part.columns, part.first_id, in_place)
            near = of_columns(near, near.shape[1], 0, True)
            near -= _sum_of_equal(targets, column + part.first_id, of_targets, x.shape[1])
            dx.scatter_(1, column, near.to(dx.dtype))
            if smoothed is not None:
                weight = self._weights_in(part)
                weight = smoothed.new_ones(1) if weight is None else weight
                dx[:, : part.columns].addcmul_(smoothed[:, None], weight, value=-1)
            return dx

        parts = self.shard.segments
        if not self.shard.tp.segments:
            return of_part(parts[0], logits, in_place)
        dlogits = logits if in_place else torch.empty_like(logits)
        for part, out in zip(parts, dlogits.tensor_split(len(parts), 1), strict=True):
            out.copy_(of_part(part, part.of(logits), False))
        return dlogits


def _rows_at_once(logits: Tensor) -> int:
    """How many rows of logits are computed in fp32 at a time."""
    return max(1, WIDE // max(1, logits.shape[1]))


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


def _of_full_rows(logits: Tensor, target: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (loss, maximum, total) of each row.

    in_place: exponentials are computed where the logits are, and become the gradient of the sum of losses
    """
    index, dtype = target.long().clamp_min(0)[:, None], sums_dtype(logits.dtype)
    picked = logits.gather(1, index)
    maxima, totals, scratch = [], [], None
    for x in logits.split(max(1, IN_CACHE // logits.shape[1])):
        maxima.append(x.amax(1, keepdim=True).to(dtype))
        if scratch is None and not in_place:
            scratch = torch.empty_like(x, dtype=dtype)
        out = x if scratch is None else scratch[: len(x)]
        totals.append(torch.sub(x, maxima[-1], out=out).exp_().sum(1, keepdim=True))
    maximum, total = (each[0] if len(each) == 1 else torch.cat(each) for each in (maxima, totals))
    ignored = target == IGNORED
    if in_place:  # the gradient of ignored rows, whose logits may be anything, is zero
        logits.mul_(total.reciprocal()).scatter_add_(1, index, -torch.ones_like(total))
        logits.index_fill_(0, ignored.nonzero()[:, 0], 0)
    loss = (total.log() + (maximum - picked))[:, 0].masked_fill(ignored, 0)
    return loss, maximum[:, 0], total[:, 0]


def sharded_loss(
    options: LossOptions,
    width: int,
    tp: TensorParallel,
    class_weight: Tensor | None = None,
    like: Tensor | None = None,
) -> ShardedLoss:
    """The loss of these options, checked.

    width: columns of each rank
    like: what the class weights have the device of; None: they were checked
    """
    op = options.op
    shard = vocab_shard(op, tp, width, options.vocab_size)
    if not 0 <= options.label_smoothing < 1:
        raise ValueError(
            f"{op}: expected label_smoothing from 0 to less than 1, got {options.label_smoothing}"
        )
    if options.label_smoothing and shard.size == 1:
        raise ValueError(f"{op}: expected no label_smoothing with one id: there is no other to give it to")
    if not 0 <= options.z_loss < math.inf:
        raise ValueError(f"{op}: expected z_loss, a coefficient, of at least 0, got {options.z_loss}")
    if class_weight is not None and like is not None:
        require_class_weight(op, class_weight, shard, like)
    return ShardedLoss(options, shard, class_weight, options.z_loss)


def in_dtype_of_loss(class_weight: Tensor | None, logits: Tensor) -> Tensor | None:
    return None if class_weight is None else as_dtype(class_weight, sums_dtype(logits.dtype))


def unpacked(how: Sequence[Any]) -> How:
    *options, tp, matmul = how
    return LossOptions(*options), tp, matmul


def unpacked_known(known_and_how: Sequence[Any]) -> tuple[Known, How]:
    size = len(Known._fields)
    return Known(*known_and_how[:size]), unpacked(known_and_how[size:])


def empty_losses(like: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Known]:
    """The loss of each target, and what else is known of it, without numbers."""
    loss = like.new_empty(target.shape, dtype=sums_dtype(like.dtype))
    rows = target.shape[:1]
    return loss, Known(
        target,
        loss.new_empty(rows),
        loss.new_empty(rows),
        None if options.scale is None else loss.new_empty(rows),
        None if options.top_k is None else (like if options.softcap is None else loss).new_empty(rows),
        loss.new_empty(rows, dtype=torch.bool) if options.metrics else None,
    )


def _losses(logits: Tensor, target: Tensor, class_weight: Tensor | None, *how: Any) -> list[Tensor | None]:
    """Compute the loss of each row, and what is in `Known`. how: the options, split and strategy"""
    options, tp, _ = unpacked(how)
    losses = sharded_loss(options, logits.shape[1], tp, class_weight)
    loss, known = losses.of_rows(logits, losses.counted(target))
    return [loss, *known]


def _losses_shape(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, *how: Any
) -> list[Tensor | None]:
    loss, known = empty_losses(logits, torch.empty_like(target), unpacked(how)[0])
    return [loss, *known]


def _gradient(
    logits: Tensor, dloss: Tensor, class_weight: Tensor | None, *known_and_how: Any
) -> list[Tensor]:
    known, (options, tp, _) = unpacked_known(known_and_how)
    losses = sharded_loss(options, logits.shape[1], tp, class_weight)
    return [losses.gradient(logits, known, dloss, in_place=False)]


def _gradient_shape(logits: Tensor, *_: object) -> list[Tensor]:
    return [logits.new_empty(logits.shape)]


KNOWN = "Tensor target, Tensor maximum, Tensor total, Tensor? mean, Tensor? least, Tensor? correct"
OPTIONS = (
    "str op, SymInt? vocab_size, float label_smoothing, int ignore_index, float? scale, int? chunk_tokens, "
    "int? top_k, float? softcap, float z_loss, bool metrics"
)
_token_losses = SplitOperator(
    OP, f"Tensor logits, Tensor target, Tensor? class_weight, {OPTIONS}", _losses, _losses_shape
)
_logits_gradient = SplitOperator(
    f"{OP}_backward",
    f"Tensor logits, Tensor dloss, Tensor? class_weight, {KNOWN}, {OPTIONS}",
    _gradient,
    _gradient_shape,
)
