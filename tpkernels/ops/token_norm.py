"""RMSNorm and LayerNorm over tokens of several ranks; parameters get the full gradient on every rank.

R ranks, T tokens, K features:

    x_shard  (T / R, K)   this rank's tokens; or x (T, K) on every rank, without a group
    dweight  = Σ over tokens of dy * n, dbias = Σ over tokens of dy      (K,)    the same on every rank

The sums of all ranks are gathered, and added in the order of ranks. With TP-invariance tokens are cut into
segments, whose sums are added in a tree, with a group or without: see `tp_invariance`. They are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.dispatch import norms
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, apply, as_dtype
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.parallel import (
    SplitOperator,
    alone_in,
    compare_request,
    split_of,
)
from tpkernels.ops.tensor_parallel.segments import canonical
from tpkernels.tp_invariance import tree_sum

Norm = Literal["rms_norm", "layer_norm"]


def token_norm(
    kind: Norm,
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    group: ProcessGroup | None,
    segments: int,
) -> Tensor:
    """Normalize the rows of x. x: (tokens, ..., features); rows: x as a matrix; the result is like rows"""
    tp = alone_in(segments) if group is None else split_of(kind, group, segments=segments)
    with tp.call:
        compare_request(kind, tp, x, [weight])
        y: Tensor = apply(_TokenNorm, kind, rows, weight, bias, eps, _segments(kind, x, tp), tp)
    return y


def _segments(kind: Norm, x: Tensor, tp: TensorParallel) -> int:
    """How many segments of tokens are summed apart: 1 without TP-invariance.

    Without a group any number of tokens will do.
    """
    if not tp.segments:
        return 1
    segments = tp.own_segments
    tokens = x.shape[0] if x.ndim > 1 else 1
    if tokens % segments == 0:
        return segments
    if tp.group is not None:
        raise ValueError(
            f"{kind}: expected tokens (dimension 0) that this rank's {segments} of the {tp.segments} "
            f"segments of TP-invariance divide, got {tuple(x.shape)}; pad the sequence"
        )
    return 1


class _TokenNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        kind: Norm,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        segments: int,
        tp: TensorParallel,
    ) -> Tensor:
        y: Tensor
        y, *statistics = _normed(x, weight, bias, kind, eps, tp=tp, matmul=PLAIN)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.options = kind, segments, tp
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel
    ) -> spmd_rules.Typed:
        group = tp.group
        parameters = (spmd_rules.full(weight, group), spmd_rules.full(bias, group))
        return spmd_rules.einsum("t_,_,_->t_", spmd_rules.split(x, group, 0), *parameters)

    @staticmethod
    @first_order("a norm with TP-invariance, or over a group", reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *statistics = ctx.saved_tensors
        kind, segments, tp = ctx.options
        _, needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        over = tp if needs_dweight or needs_dbias else alone_in(tp.segments)
        with tp.call:
            dx, sums = _gradients(dy, x, weight, statistics, kind, segments, tp=over, matmul=PLAIN)
        return (
            None,
            dx if needs_dx else None,
            as_dtype(sums[0], weight.dtype) if needs_dweight else None,
            as_dtype(sums[1], ctx.bias_dtype) if needs_dbias else None,
            None,
            None,
            None,
        )


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float, *_: object) -> list[Tensor]:
    """Compute y, and the statistics of each token."""
    if kind == "rms_norm":
        return list(norms.rms_norm(x, weight, eps))
    return list(norms.layer_norm(x, weight, bias, eps))


def _rows_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float, *_: object
) -> list[Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    count = 1 if kind == "rms_norm" else 2
    return [x.new_empty(x.shape), *(x.new_empty(x.shape[0], dtype=wide) for _ in range(count))]


_normed = SplitOperator(
    "token_norm", "Tensor x, Tensor weight, Tensor? bias, str kind, float eps", _rows, _rows_shape
)


def _of_segments(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    kind: Norm,
    segments: int,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor]:
    """Compute dx, and the sums over all tokens, (1 or 2, features): dweight and dbias.

    tp: whose ranks have the other tokens
    """
    norm_grad: Callable[..., tuple[Tensor, ...]] = (
        norms.rms_norm_grad if kind == "rms_norm" else norms.layer_norm_grad
    )
    size = x.shape[0] // segments
    dxs, terms = [], []
    for segment in range(segments):
        tensors = [canonical(t[segment * size : (segment + 1) * size]) for t in (dy, x, *statistics)]
        dx, *of_parameters = norm_grad(*tensors[:2], weight, *tensors[2:])
        dxs.append(dx)
        terms.append(torch.stack(of_parameters))
    sums = tree_sum(terms)
    if tp.group is not None:
        everybody = tp.gather_numbers(kind, "sums over tokens", sums)
        sums = tree_sum(everybody.unbind()) if tp.segments else reduce(add, everybody.unbind())
    return [dxs[0] if segments == 1 else torch.cat(dxs), sums]


def _of_segments_shape(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Sequence[Tensor], *_: object
) -> list[Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return [x.new_empty(x.shape), x.new_empty(len(statistics), x.shape[1], dtype=wide)]


_gradients = SplitOperator(
    "token_norm_backward",
    "Tensor dy, Tensor x, Tensor weight, Tensor[] statistics, str kind, int segments",
    _of_segments,
    _of_segments_shape,
)
