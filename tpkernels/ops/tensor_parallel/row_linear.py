"""Row-parallel linear: each rank computes a partial sum of every feature, from the features it has.

R ranks, T tokens, K in_features, N out_features:

    x_shard   (T, K / R)   all tokens, our features         w_shard  (N, K / R)
    y_shard   (T / R, N)   our tokens under sequence parallelism, else y (T, N) on every rank
    bias      (N,)         the same on every rank

    forward   y_shard  = reduce_scatter(x_shard w_shardᵀ) + bias    chunks travel while others are computed
    dgrad     dx_shard = all_gather(dy_shard) w_shard               rows as they arrive
    wgrad     dw_shard = dyᵀ x_shard                                of the same rows; on a CPU as they arrive
    dbias     db       = dy.sum(0)                                  the same on every rank

Without sequence parallelism y is all-reduced, and backward communicates nothing. Sums over ranks are in fp32
in the order of ranks, the bias is added once, and the result is rounded once.

Saved for backward: x_shard and w_shard, as far as a gradient needs them. How products are computed:
`ops.matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    Context,
    any_autocast,
    apply,
    autocast,
    check_linear,
    features_of,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.local.norm import Norm
from tpkernels.ops.main_grad import (
    Into,
    WeightGradient,
    add_if_traced,
    asked_for,
    check_main_grad,
    flags_if_traced,
)
from tpkernels.ops.matmul import Plain
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel import (
    SplitOperator,
    compare_in_backward,
    compare_request,
    recorded,
    refuse_tokens,
    refuse_uneven,
    require_segments,
    shaped_like,
    split_of,
    strategy_of,
)
from tpkernels.ops.tensor_parallel.residual_norm import (
    NO_GRADIENTS,
    NOTHING,
    SCHEMA,
    Added,
    Saved,
    added,
    gradients,
    reduced,
)


@overload
def row_linear(
    x_shard: Tensor,
    weight_shard: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | None = None,
    quantize: Recipe | None = None,
    tp_invariant: int | None = None,
    residual: None = None,
    norm: None = None,
) -> Tensor: ...


@overload
def row_linear(
    x_shard: Tensor,
    weight_shard: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | None = None,
    quantize: Recipe | None = None,
    tp_invariant: int | None = None,
    residual: Tensor,
    norm: Norm,
) -> tuple[Tensor, Tensor]: ...


def row_linear(
    x_shard: Tensor,
    weight_shard: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | None = None,
    quantize: Recipe | None = None,
    tp_invariant: int | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute x weightᵀ + bias, summed over the ranks' features.

    x_shard: (tokens, ..., in_features / R)
    weight_shard: (out_features, in_features / R)
    bias: (out_features,)
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    quantize: compute it in fp8, and gather gradients in fp8
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    residual, norm: like the output; and a norm of it plus the output, see `residual_norm`
    returns: (tokens, ..., out_features), or this rank's tokens of dimension 0 if sequence_parallel; with
        residual and norm the residual plus that, and its norm
    """
    op = "row_linear"
    tp = split_of(op, group, sequence_parallel, overlap, tp_invariant)
    with tp.call:
        if parallel.debug:
            alike = bias is not None, quantize, norm and norm.options
            compare_request(op, tp, x_shard, [weight_shard, bias], alike, width=weight_shard.shape[0])
        if sequence_parallel and x_shard.ndim < 2:
            refuse_tokens(op, x_shard, "x_shard")
        if any_autocast() and is_casting(x_shard):
            x_shard, weight_shard, bias = autocast(x_shard, weight_shard, bias)
        features = x_shard.shape[-1] if x_shard.ndim else features_of(op, x_shard)
        check_linear(op, x_shard, features, weight_shard, bias, ("weight_shard", "bias"))
        if main_grad is not None:
            check_main_grad(op, main_grad, weight_shard)
        matmul = strategy_of(op, tp, quantize, x_shard)
        if matmul.segments:
            require_segments(op, tp, "columns of weight_shard", weight_shard.shape[1])
        if sequence_parallel and x_shard.shape[0] % tp.ranks:
            refuse_uneven(op, x_shard, tp)
        tokens = x_shard if x_shard.ndim == 2 else tokens_of(x_shard)
        given, after = NOTHING, None
        if residual is not None or norm is not None:
            shape = [*x_shard.shape[:-1], weight_shard.shape[0]]
            if len(shape) > 1:
                shape[0] //= tp.token_shards
            given, after = added(op, residual, norm, x_shard, shape, tp)
        y: Any
        if recorded((x_shard, weight_shard, bias, *given[:3])):
            y = apply(_RowLinear, tp, matmul, main_grad, tokens, weight_shard, bias, *given, after)
        else:
            operands = matmul.pack(tokens), weight_shard, bias, tokens.dtype
            found = row_forward(*operands, *given, tp=tp, matmul=matmul)
            y = found[0] if after is None else (found[0], found[1])
    if residual is not None:
        h, normed = y
        return like_tokens(h, residual), like_tokens(normed, residual)
    total: Tensor = y
    return total if x_shard.ndim == 2 else shaped_like(total, x_shard, x_shard.shape[0] // tp.token_shards)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        tp: TensorParallel,
        matmul: Plain,
        main_grad: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        norm: str,
        eps: float,
        after: Saved | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        needs_dx, needs_dw = ctx.needs_input_grad[3:5]
        given = residual, norm_weight, norm_bias, norm, eps
        y, *normed = row_forward(matmul.pack(x), weight, bias, x.dtype, *given, tp=tp, matmul=matmul)
        of_norm = [] if after is None else [y, norm_weight, *normed[1:]]
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None, *of_norm)
        ctx.options, ctx.main_grads = (tp, matmul, after), [main_grad]
        return y if after is None else (y, normed[0])

    @staticmethod
    def spmd_typecheck(
        *,
        tp: TensorParallel,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
    ) -> spmd_rules.Typed:
        return spmd_rules.normed(spmd_rules.row(x, weight, bias, tp), residual, norm_weight, norm_bias, tp)

    @staticmethod
    @first_order("row_linear")
    def backward(ctx: Context, dy: Tensor, *dnormed: Tensor) -> tuple[Tensor | None, ...]:
        (needs_dx, needs_dw, needs_db), main_grads = ctx.needs_input_grad[3:6], ctx.main_grads
        (x, weight, *of_norm), (tp, matmul, after) = ctx.saved_tensors, ctx.options
        (needs_dw,) = asked_for(ctx, main_grads, [needs_dw], 2)
        needs = needs_dx, needs_dw, needs_db
        of_added: Sequence[Tensor | None] = NO_GRADIENTS
        with tp.call:
            if after is not None:
                dy, of_added = gradients(after, of_norm, (dy, *dnormed), ctx.needs_input_grad[6:9], tp)
            arguments = dy, x if needs_dw else None, weight, needs, flags_if_traced(main_grads)
            dx, dw, db = row_gradients(*arguments, tp=tp, matmul=matmul, given=needs)
        return None, None, None, dx, *add_if_traced(main_grads, [dw]), db, *of_added, None, None, None


def _forward(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    tp: TensorParallel,
    matmul: Plain,
) -> list[Tensor]:
    """Compute y, or what follows it. rows: of x, packed; dtype: of y"""
    terms = matmul.terms([(rows, weight)], True, dtype)
    if bias is not None and tp.ranks > 1 and bias.dtype != terms.like.dtype:
        bias = bias.to(terms.like.dtype)
    if residual is None:
        return [tp.reduce("row_linear", terms, bias).wait()]
    return reduced("row_linear", terms, bias, Added(residual, norm_weight, norm_bias, norm, eps), tp, matmul)


row_forward = SplitOperator(
    "row_linear",
    f"Tensor rows, Tensor weight, Tensor? bias, ScalarType dtype, {SCHEMA}",
    _forward,
)


def _gradients(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: Sequence[bool],
    main_grads: Sequence[Into],
    tp: TensorParallel,
    matmul: Plain,
) -> list[Tensor | None]:
    """Compute dx, dw, db. x, weight: None if dw, dx are not needed"""
    op, (into,), dtype, features = "row_linear backward", main_grads, dy.dtype, dy.shape[1]
    if tp.sequence_parallel:
        compare_in_backward(op, tp, needs)
    width = 0 if weight is None else weight.shape[1]
    splits = tp.token_shards > 1
    rows = matmul.pack(dy, "dy") if splits or weight is not None else dy
    weights = [] if weight is None else [weight]
    multiply = partial(matmul.product, weights=weights, biases=[None], dtype=dtype, transposed=False)
    gathering = tp.gather(op, "dy", rows, width, matmul.how_dy, ("dgrad", weights, multiply))
    dx = dw = db = also = None
    # a GPU takes all rows at once: dgrad hides the transfers
    if x is not None and x.is_cpu and matmul.is_plain and not gathering.is_whole and not gathering.delivery:
        also = _ArrivingWeightGradient(x, into)
    if weight is not None:
        (dx,) = multiply(gathering, also=also)
    elif also is not None:
        matmul.each(gathering, [], also, dtype)
    full = gathering.all()  # also if nobody asks for dy: the call ends for all ranks alike
    if x is not None or needs[2]:
        if splits:
            dy = matmul.unpack(full, features, dtype, "dy")
        if also is not None:
            dw = also.get()
        elif x is not None:
            dw = matmul.wgrad(dy, x, into, split="x")
        db = matmul.bias_grad(dy, split=False) if needs[2] else None
    return [dx, dw, db]


row_gradients = SplitOperator(
    "row_linear_backward",
    "Tensor dy, Tensor? x, Tensor? weight, bool[] needs, bool[] main_grads",
    _gradients,
)


class _ArrivingWeightGradient:
    """Accumulates dw over rows as they arrive.

    Each product reads and writes all of dw, and therefore takes at least a quarter of the rows.
    """

    def __init__(self, x: Tensor, into: Into) -> None:
        self._x, self._sum, self._least_rows = x, WeightGradient(into), x.shape[0] // 4
        self._dys: list[Tensor] = []
        self._rows = slice(0, 0)  # of `_dys`

    def __call__(self, rows: slice, dy: Tensor, *_: object) -> None:
        if rows.start != self._rows.stop:
            self._multiply()
            self._rows = slice(rows.start, rows.start)
        self._dys.append(dy)
        self._rows = slice(self._rows.start, rows.stop)
        if self._rows.stop - self._rows.start >= self._least_rows:
            self._multiply()

    def get(self) -> Tensor | None:
        """The sum; None if it was added to a main_grad."""
        self._multiply()
        return self._sum.get()

    def _multiply(self) -> None:
        if self._dys:
            dy = self._dys[0] if len(self._dys) == 1 else torch.cat(self._dys)
            self._sum.add(dy, self._x[self._rows])
        self._dys, self._rows = [], slice(self._rows.stop, self._rows.stop)
