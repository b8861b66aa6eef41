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
`ops.numerics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, autocast, check_linear, features_of, is_casting, tokens_of
from tpkernels.ops.main_grad import (
    Into,
    MainGrads,
    WeightGradient,
    add_if_traced,
    asked_for,
    check_main_grad,
    empty_weight_gradient,
)
from tpkernels.ops.tensor_parallel.layout import (
    Layout,
    apply_distinct,
    checked_layout,
    recorded,
    shaped_like,
)
from tpkernels.ops.tensor_parallel.parallel import require_divisible, require_segments

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # dx, dw, db


@from_entry
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
) -> Tensor:
    """Compute x weightᵀ + bias, summed over the ranks' features.

    x_shard: (tokens, ..., in_features / R)
    weight_shard: (out_features, in_features / R)
    bias: (out_features,)
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    quantize: compute it in fp8, and gather gradients in fp8
    returns: (tokens, ..., out_features), or this rank's tokens of dimension 0 if sequence_parallel
    """
    op = "row_linear"
    layout = checked_layout(
        op,
        x_shard,
        [weight_shard, bias],
        group,
        sequence_parallel,
        overlap,
        (bias is not None, quantize),
        width=weight_shard.shape[0],
        name="x_shard",
    )
    if is_casting(x_shard):
        x_shard, weight_shard, bias = autocast(x_shard, weight_shard, bias)
    check_linear(op, x_shard, features_of(op, x_shard), weight_shard, bias, ("weight_shard", "bias"))
    if main_grad is not None:
        check_main_grad(op, main_grad, weight_shard)
    if layout.numerics.segments:
        require_segments(op, layout.numerics.segments, "columns of weight_shard", weight_shard.shape[1])
    if sequence_parallel:
        require_divisible(op, x_shard, group)
    if quantize is not None:
        layout = layout.in_fp8(op, quantize, x_shard)
    tokens = x_shard if x_shard.ndim == 2 else tokens_of(x_shard)
    y: Tensor
    if recorded(x_shard, weight_shard, bias):
        y = apply_distinct(_RowLinear, layout, main_grad, tensors=[tokens, weight_shard, bias])
    else:
        y = row_forward(tokens, weight_shard, bias, layout)
    return y if x_shard.ndim == 2 else shaped_like(y, x_shard, x_shard.shape[0] // layout.token_shards)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        layout: Layout,
        main_grad: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        _, _, needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.layout, ctx.main_grads = layout, [main_grad]
        return row_forward(x, weight, bias, layout)

    @staticmethod
    def spmd_typecheck(*, layout: Layout, x: Tensor, weight: Tensor, bias: Tensor | None) -> spmd_rules.Typed:
        return spmd_rules.row(x, weight, bias, layout)

    @staticmethod
    @first_order("row_linear")
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        (needs_dx, needs_dw, needs_db), main_grads = ctx.needs_input_grad[2:], ctx.main_grads
        x, weight = ctx.saved_tensors
        (needs_dw,) = asked_for(ctx, main_grads, [needs_dw], 2)
        needs, x = (needs_dx, needs_dw, needs_db), x if needs_dw else None
        dx, dw, db = row_gradients(needs, dy, x, weight, main_grads, ctx.layout)
        return None, None, dx, *add_if_traced(main_grads, [dw]), db


@all_or_fail
def _row_forward(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
    pairs = [(layout.numerics.activations(x), weight)]
    return layout.sum_of_products("row_linear", pairs, transposed=True, bias=bias).wait()


def _row_shape(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
    return x.new_empty(x.shape[0] // layout.token_shards, weight.shape[0])


row_forward = Operator("row_linear", _row_forward, _row_shape)


@all_or_fail
def _row_gradients(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    main_grads: MainGrads,
    layout: Layout,
) -> Gradients:
    """Compute dx, dw, db. x, weight: None if dw, dx are not needed"""
    op, (into,), numerics = "row_linear backward", main_grads, layout.numerics
    if layout.sequence_parallel:
        layout.compare_in_backward(op, needs)
    features = 0 if weight is None else weight.shape[1]
    gathering = layout.gather(op, "dy", dy_shard, numerics.gradients, features=features)
    dx = dw = db = also = None
    # a GPU takes all rows at once: dgrad hides the transfers
    if x is not None and x.is_cpu and gathering.arrives and numerics.sums_any_order:
        also = _ArrivingWeightGradient(x, into)
    if weight is not None:
        dx = gathering.product(weight, also)
    elif also is not None:
        gathering.each([], also)
    gathering.wait()  # also if nobody asks for dy: the call ends for all ranks alike
    if x is not None or needs[2]:
        dy = gathering.numbers()
        if also is not None:
            dw = also.get()
        elif x is not None:
            dw = numerics.weight_gradient(dy, x, into, split="x")
        db = numerics.bias_gradient(dy, split=False) if needs[2] else None
    return dx, dw, db


def _row_gradient_shapes(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    main_grads: MainGrads,
    layout: Layout,
) -> Gradients:
    tokens, features = dy_shard.shape[0] * layout.token_shards, dy_shard.shape[1]
    return (
        None if weight is None else dy_shard.new_empty(tokens, weight.shape[1]),
        None if x is None else empty_weight_gradient(dy_shard, x, main_grads[0]),
        dy_shard.new_empty(features) if needs[2] else None,
    )


row_gradients = Operator("row_linear_backward", _row_gradients, _row_gradient_shapes)


class _ArrivingWeightGradient:
    """Accumulates dw over rows as they arrive.

    Each product reads and writes all of dw, and therefore takes at least a quarter of the rows.
    """

    def __init__(self, x: Tensor, into: Into) -> None:
        self._x, self._sum, self._least_rows = x, WeightGradient(into), x.shape[0] // 4
        self._dys: list[Tensor] = []
        self._rows = slice(0, 0)  # of `_dys`

    def __call__(self, rows: slice, dy: Tensor, _: list[Tensor]) -> None:
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
