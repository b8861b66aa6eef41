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

Saved for backward: x_shard and w_shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, autocast, check_linear, features_of, is_casting, tokens_of
from tpkernels.ops.main_grad import (
    Into,
    MainGrads,
    WeightGradient,
    add_if_traced,
    check_main_grad,
    weight_gradient,
)
from tpkernels.ops.quantized import row_linear as row_linear_in_fp8
from tpkernels.ops.quantized.limits import require_quantizable
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel.operands import (
    Gradients,
    Layout,
    apply_distinct,
    bias_gradient,
    checked_layout,
    recorded,
    row_gradient_shapes,
    row_shape,
    shaped_like,
)
from tpkernels.ops.tensor_parallel.parallel import compare_in_backward, multiplying, require_divisible
from tpkernels.ops.tensor_parallel.segments import (
    Along,
    by_segment,
    require_segments,
    segmented_weight_gradient,
)


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
    """x weightᵀ + bias, summed over the ranks' features.

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
    check_main_grad(op, main_grad, weight_shard)
    require_segments(op, layout.segments, [("columns of weight_shard", weight_shard.shape[1])])
    if sequence_parallel:
        require_divisible(op, x_shard, layout.group)
    tokens = tokens_of(x_shard)
    split: Layout | Span = layout
    if quantize is not None:
        require_quantizable(op, quantize, x_shard)
        split = Span(layout.group, sequence_parallel, overlap, quantize)
    y: Tensor
    if recorded(x_shard, weight_shard, bias):
        y = apply_distinct(_RowLinear, split, main_grad, tensors=[tokens, weight_shard, bias])
    else:
        y = _forward(tokens, weight_shard, bias, split)
    return y if x_shard.ndim == 2 else shaped_like(y, x_shard, x_shard.shape[0] // layout.token_shards)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        split: Layout | Span,
        main_grad: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        _, _, needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.split, ctx.main_grads = split, [main_grad]
        return _forward(x, weight, bias, split)

    @staticmethod
    @first_order("row_linear")
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, main_grads, (x, weight) = ctx.needs_input_grad[2:], ctx.main_grads, ctx.saved_tensors
        dx, dw, db = _gradients(needs, dy, x, weight, main_grads, ctx.split)
        return None, None, dx, *add_if_traced(main_grads, [dw]), db


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, split: Layout | Span) -> Tensor:
    if isinstance(split, Span):
        return row_linear_in_fp8.row_forward(x, weight, bias, split)
    return row_forward(x, weight, bias, split)


def _gradients(
    needs: Sequence[bool],
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    main_grads: MainGrads,
    split: Layout | Span,
) -> Gradients:
    if isinstance(split, Span):
        return row_linear_in_fp8.row_gradients(needs, dy, x, weight, main_grads, split)
    return row_gradients(needs, dy, x, weight, main_grads, split)


@all_or_fail
def _row_forward(x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
    pairs = [(layout.operand(x), weight)]
    return layout.sum_of_products("row_linear", pairs, transposed=True, bias=bias).wait()


row_forward = Operator("row_linear", _row_forward, row_shape)


@all_or_fail
def _row_gradients(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    main_grads: MainGrads,
    layout: Layout,
) -> Gradients:
    """dx, dw, db. x, weight: None where dw, dx are not needed"""
    op, (into,) = "row_linear backward", main_grads
    dy_shard, x = layout.operand(dy_shard), None if x is None else layout.operand(x)
    if layout.sequence_parallel:
        compare_in_backward(op, layout.group, needs)
    like = x if weight is None else weight
    calls = 0 if like is None else layout.calls(like.device)
    if layout.token_shards == 1 and not layout.segments:
        dx = None if weight is None else primitives.dgrad(dy_shard, weight)
        dw = None if x is None else weight_gradient(dy_shard, x, into)
        return dx, dw, bias_gradient(dy_shard) if needs[2] else None
    gathering = layout.gather(op, "gather of dy", dy_shard, features=0 if weight is None else weight.shape[1])
    if multiplying(gathering, layout.overlap) and weight is not None:
        ((dx, _),) = gathering.products([weight.t()], [None], "none", False, keep_rows=True)
        dy = gathering.wait()
        dw = None if x is None else weight_gradient(dy, x, into)
    else:
        tokens = dy_shard.shape[0] * layout.token_shards
        # a GPU takes all rows at once: dgrad hides the transfers; and one order of tokens needs them all
        as_they_arrive = layout.overlap and not layout.segments
        batches = _Batches(x, into, tokens) if x is not None and as_they_arrive and x.is_cpu else None

        def multiply(rows: slice, dy_chunk: Tensor, dx: list[Tensor]) -> None:
            if batches is not None:
                batches.add(rows, dy_chunk)
            if weight is not None:
                by_segment(
                    calls, primitives.dgrad, [Along(each, 1) for each in dx], dy_chunk, Along(weight, 1)
                )

        widths = [] if weight is None else [weight.shape[1]]
        results = layout.rowwise(gathering, tokens, widths, multiply)
        dx = results[0] if results else None
        dy = gathering.wait()
        if batches is not None:
            dw = batches.get()
        else:
            dw = None if x is None else segmented_weight_gradient(dy, x, into, calls, dim=1)
    return dx, dw, bias_gradient(dy) if needs[2] else None


class _Batches:
    """dw of rows as they arrive: the next ones may not be there yet. Each product reads and writes all of dw,
    so that it takes a quarter of the rows or more.
    """

    def __init__(self, x: Tensor, into: Into, tokens: int) -> None:
        self._x, self._sum, self._least_rows = x, WeightGradient(into), tokens // 4
        self._dys: list[Tensor] = []
        self._rows = slice(0, 0)  # that they are of

    def add(self, rows: slice, dy: Tensor) -> None:
        if rows.start != self._rows.stop:
            self._multiply()
            self._rows = slice(rows.start, rows.start)
        self._dys.append(dy)
        self._rows = slice(self._rows.start, rows.stop)
        if self._rows.stop - self._rows.start >= self._least_rows:
            self._multiply()

    def get(self) -> Tensor | None:
        """As of `WeightGradient`."""
        self._multiply()
        return self._sum.get()

    def _multiply(self) -> None:
        if self._dys:
            dy = self._dys[0] if len(self._dys) == 1 else torch.cat(self._dys)
            self._sum.add(dy, self._x[self._rows])
        self._dys, self._rows = [], slice(self._rows.stop, self._rows.stop)


row_gradients = Operator("row_linear_backward", _row_gradients, row_gradient_shapes)
