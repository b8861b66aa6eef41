"""RMSNorm and LayerNorm over the features of each token, as differentiable operators.

T tokens, K features; sums over the features of a token, in fp32 or wider:

    x    (T, K)      weight, bias  (K,)        over a group of R ranks x_shard (T / R, K): this rank's tokens

    forward   mean = Σ x / K,  rstd = 1 / sqrt(Σ (x - mean)² / K + eps)        mean is 0 for RMSNorm
              n = (x - mean) * rstd,  y = n * weight + bias                    one kernel
    dx        rstd * (dn - n * Σ (dn * n) / K - Σ dn / K),  dn = dy * weight   the last for LayerNorm only
    dweight   Σ over tokens of dy * n,    dbias = Σ over tokens of dy          in fp32, rounded once

Parameters may be fp32 where x is narrower; y is in the dtype of x, in autocast regions too, where nothing is
cast: the sums are wide anyway.

Over a group dweight and dbias are the same on every rank: the sums of all ranks are gathered, and added in
the order of ranks. With TP-invariance tokens are cut into segments, whose sums are added in a tree, with a
group or without: see `tp_invariance`.

Saved for backward: x, weight, and mean (of LayerNorm) and rstd of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.dispatch import norms
from tpkernels.dispatch.products import sums_dtype
from tpkernels.kernels.reference import layer_norm_bwd_ref, layer_norm_ref, rms_norm_bwd_ref, rms_norm_ref
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    Context,
    apply,
    as_dtype,
    computed,
    features_of,
    in_forward_mode,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.parallel import (
    ALONE,
    SplitOperator,
    alone_in,
    compare_request,
    split_of,
)
from tpkernels.ops.tensor_parallel.segments import canonical
from tpkernels.tp_invariance import given_or_default, tree_sum

NormKind = Literal["rms_norm", "layer_norm"]


@dataclass(frozen=True)
class Norm:
    """A norm that an op computes of its output plus a residual, see `row_linear`.

    weight, bias: (features,), in the dtype of the residual or fp32; RMSNorm has no bias
    zero_centered: the norm multiplies by 1 + weight, as Gemma does
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-5
    kind: NormKind = "rms_norm"
    zero_centered: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(NormKind):
            raise ValueError(f"Norm: expected {' or '.join(get_args(NormKind))} as kind, got {self.kind!r}")
        if self.bias is not None and self.kind == "rms_norm":
            raise ValueError("Norm: expected no bias for rms_norm; pass kind='layer_norm', or no bias")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"Norm: expected an eps of 0 or more, got {self.eps}")

    @property
    def options(self) -> tuple[object, ...]:
        """What must be the same on all ranks, beside tensors."""
        return self.kind, self.bias is not None, self.eps, self.zero_centered


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Normalize x by its root mean square: x / rms(x) * weight.

    x: (..., features)
    weight: (features,), in the dtype of x or fp32
    group: its ranks have the other tokens (dimension 0); the gradient of weight is summed over them
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    """
    return _norm("rms_norm", x, weight, None, eps, group, tp_invariant)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Normalize x to zero mean and unit variance; return it times weight plus bias.

    x: (..., features)
    weight, bias: (features,), in the dtype of x or fp32
    group: its ranks have the other tokens (dimension 0); gradients of weight and bias are summed over them
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    """
    return _norm("layer_norm", x, weight, bias, eps, group, tp_invariant)


def _norm(
    kind: NormKind,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    group: ProcessGroup | None,
    tp_invariant: int | None,
) -> Tensor:
    segments = given_or_default(tp_invariant)
    features = features_of(kind, x)
    if not x.is_floating_point():
        raise TypeError(f"{kind}: expected floating-point tensors, got x in {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_parameter(kind, name, parameter, x, features)
    rows, recorded = tokens_of(x), torch.is_grad_enabled() or in_forward_mode()
    over_ranks = recorded and group is not None
    if not over_ranks and not segments:
        return like_tokens(computed(_Norm, kind, rows, weight, bias, eps, 0, ALONE), x)
    tp = split_of(kind, group, segments=segments) if over_ranks else alone_in(segments)
    with tp.call:
        compare_request(kind, tp, x, [weight])
        y = apply(_Norm, kind, rows, weight, bias, eps, segments_of_tokens(kind, x, tp), tp)
    return like_tokens(y, x)


def check_parameter(op: str, name: str, parameter: Tensor, x: Tensor, features: int) -> None:
    """Raise unless a norm's parameter fits x."""
    if parameter.shape != (features,):
        raise ValueError(
            f"{op}: expected {name} ({features},) for x {tuple(x.shape)}, got {tuple(parameter.shape)}"
        )
    if parameter.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{op}: expected {name} in {x.dtype} like x, or in torch.float32, got {parameter.dtype}; "
            "cast one of them"
        )
    # asking two tensors whether they are on the CPU is quicker than comparing devices
    if not (x.is_cpu and parameter.is_cpu) and parameter.device != x.device:
        raise ValueError(
            f"{op}: expected one device, got x on {x.device} and {name} on {parameter.device}; move one"
        )


def segments_of_tokens(op: str, x: Tensor, tp: TensorParallel) -> int:
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
            f"{op}: expected tokens (dimension 0) that this rank's {segments} of the {tp.segments} "
            f"segments of TP-invariance divide, got {tuple(x.shape)}; pad the sequence"
        )
    return 1


class _Norm(torch.autograd.Function):
    """segments: 0: of tokens that no other rank has a part in: then it has second derivatives"""

    @staticmethod
    def forward(
        ctx: Context,
        kind: NormKind,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        segments: int,
        tp: TensorParallel,
    ) -> Tensor:
        y: Tensor
        if segments:
            y, *statistics = _normed(x, weight, bias, kind, eps, tp=tp, matmul=PLAIN)
        else:
            y, *statistics = _rows(x, weight, bias, kind, eps)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.options = kind, eps, segments, tp
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel
    ) -> spmd_rules.Typed:
        group = tp.group
        parameters = (spmd_rules.full(weight, group), spmd_rules.full(bias, group))
        return spmd_rules.einsum("t_,_,_->t_", spmd_rules.split(x, group, 0), *parameters)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, _, segments, _ = ctx.options
        _, needs_dx, *needs = ctx.needs_input_grad[:4]
        dx, *sums = (_of_all_tokens if segments else _of_these_tokens)(ctx, dy)
        of_parameters = [
            as_dtype(sums[i], dtype) if need else None
            for i, (need, dtype) in enumerate(zip(needs, ctx.dtypes, strict=True))
        ]
        return None, dx if needs_dx else None, *of_parameters, None, None, None


def _of_these_tokens(ctx: Context, dy: Tensor) -> Sequence[Tensor]:
    x, weight, *statistics = ctx.saved_tensors
    kind, eps, _, _ = ctx.options
    if not torch.is_grad_enabled():
        return _GRADIENT_OF[kind](dy, x, weight, *statistics, None)
    # what was saved is constant, what is overwritten has no derivative, and torch's fused gradient not all
    forward, gradient = _REFERENCE_OF[kind]
    _, *statistics = forward(x, weight, eps=eps)
    return gradient(dy, x, weight, *statistics)


@first_order("a norm with TP-invariance, or over a group", reads_intermediates=True)
def _of_all_tokens(ctx: Context, dy: Tensor) -> Sequence[Tensor]:
    x, weight, *statistics = ctx.saved_tensors
    kind, _, segments, tp = ctx.options
    over = tp if any(ctx.needs_input_grad[2:4]) else alone_in(tp.segments)
    with tp.call:
        return norm_gradients(dy, x, weight, statistics, kind, segments, over)


def norm_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    kind: NormKind,
    segments: int,
    tp: TensorParallel,
    plus: Tensor | None = None,
) -> Sequence[Tensor]:
    """Compute dx, and the sums over tokens: dweight, and dbias of a LayerNorm.

    segments: of tokens, summed over the ranks of tp; 0: of these tokens, as one
    plus: another gradient of x, which is added to dx
    """
    if not segments:
        return _GRADIENT_OF[kind](dy, x, weight, *statistics, plus)
    dx, sums = _gradients(dy, x, weight, statistics, plus, kind, segments, tp=tp, matmul=PLAIN)
    return dx, *sums.unbind()


_GRADIENT_OF: dict[NormKind, Callable[..., tuple[Tensor, ...]]] = {
    "rms_norm": norms.rms_norm_grad,
    "layer_norm": norms.layer_norm_grad,
}
_REFERENCE_OF: dict[NormKind, tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]]]] = {
    "rms_norm": (rms_norm_ref, rms_norm_bwd_ref),
    "layer_norm": (layer_norm_ref, layer_norm_bwd_ref),
}


def _rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, eps: float, *_: object
) -> list[Tensor]:
    """Compute y, and the statistics of each token."""
    if kind == "rms_norm":
        return list(norms.rms_norm(x, weight, eps))
    return list(norms.layer_norm(x, weight, bias, eps))


def _rows_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, eps: float, *_: object
) -> list[Tensor]:
    wide = sums_dtype(x.dtype)
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
    plus: Tensor | None,
    kind: NormKind,
    segments: int,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor]:
    """Compute dx, and the sums over all tokens, (1 or 2, features): dweight and dbias.

    tp: whose ranks have the other tokens
    """
    dxs, terms = [], []
    given = dy, x, *statistics, *([] if plus is None else [plus])
    for tensors in zip(*(t.tensor_split(segments) for t in given), strict=True):
        some_dy, some_x, *of_tokens = map(canonical, tensors)
        added = [None] if plus is None else []
        dx, *of_parameters = _GRADIENT_OF[kind](some_dy, some_x, weight, *of_tokens, *added)
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
    return [x.new_empty(x.shape), x.new_empty(len(statistics), x.shape[1], dtype=sums_dtype(x.dtype))]


_gradients = SplitOperator(
    "token_norm_backward",
    "Tensor dy, Tensor x, Tensor weight, Tensor[] statistics, Tensor? plus, str kind, int segments",
    _of_segments,
    _of_segments_shape,
)
