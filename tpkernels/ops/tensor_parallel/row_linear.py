"""Row-parallel linear: each rank computes a part of every sum, from the features it has.

R ranks, T tokens, K in_features, N out_features:

    x_shard   (T, K / R)   all tokens, our features         w_shard  (N, K / R)
    y_shard   (T / R, N)   our tokens under sequence parallelism, else y (T, N) on every rank
    bias      (N,)         the same on every rank

    forward   y_shard  = reduce_scatter(x_shard w_shardᵀ) + bias    pieces travel while others are computed
    dgrad     dx_shard = all_gather(dy_shard) w_shard               rows as they arrive
    wgrad     dw_shard = dyᵀ x_shard                                of the same rows, in fp32, as they arrive
    dbias     db       = dy.sum(0)                                  whole on every rank

Without sequence parallelism y is all-reduced, and backward communicates nothing. Sums over ranks are in fp32
in the order of ranks, the bias is added once, and the result is rounded once.

Saved for backward: x_shard and w_shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.steps import steps_on
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import autocast, casting, check_linear, compiling, features_of, tokens_of
from tpkernels.ops.main_grad import (
    WeightGradient,
    check_main_grad,
    sum_for,
    weight_gradient,
    with_main_grad,
)
from tpkernels.ops.registered import dtype_of_sums, or_empty
from tpkernels.ops.tensor_parallel.parallel import (
    arrivals,
    checked_group,
    compare_in_backward,
    group_named,
    multiplying,
    name_of,
    require_divisible,
    start_rows,
    start_sum,
)


@dataclass(frozen=True)
class RowCall:
    """What a call is besides its tensors."""

    group: ProcessGroup
    sequence_parallel: bool
    overlap: bool
    main_grad: Tensor | None = None


def row_linear(
    x_shard: Tensor,
    weight_shard: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | None = None,
) -> Tensor:
    """x weightᵀ + bias, summed over the ranks' features.

    x_shard: (tokens, ..., in_features / R)
    weight_shard: (out_features, in_features / R)
    bias: (out_features,)
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    returns: (tokens, ..., out_features), or this rank's tokens of dimension 0 if sequence_parallel
    """
    op = "row_linear"
    group = checked_group(
        group,
        op,
        dtype=x_shard.dtype,
        rows=x_shard.shape[:-1],
        width=weight_shard.shape[0],
        tensors=[x_shard, weight_shard, bias],
        options=(bias is not None, sequence_parallel, overlap),
    )
    if casting(x_shard):
        x_shard, weight_shard, bias = cast(
            "tuple[Tensor, Tensor, Tensor | None]", autocast(x_shard, weight_shard, bias)
        )
    check_linear(op, x_shard, features_of(op, x_shard), weight_shard, bias, ("weight_shard", "bias"))
    check_main_grad(op, main_grad, weight_shard)
    leading = list(x_shard.shape[:-1])
    if sequence_parallel:
        if x_shard.ndim < 2:
            raise ValueError(
                f"{op}: expected x_shard (tokens, ..., in_features) with sequence_parallel, got 1-D"
            )
        require_divisible(op, x_shard, group)
        leading[0] //= group.size()
    call = RowCall(group, sequence_parallel, overlap, main_grad)
    x = tokens_of(x_shard)
    y: Tensor
    if compiling(op):
        inputs = x, weight_shard, bias, name_of(group), sequence_parallel, overlap
        y = (
            registered_row_linear(*inputs)
            if main_grad is None
            else accumulating_row_linear(*inputs, main_grad)
        )
    else:
        y = _RowLinear.apply(call, x, weight_shard, bias)  # type: ignore[no-untyped-call]
    return y if x_shard.ndim == 2 else y.view(*leading, y.shape[1])


class _RowLinear(torch.autograd.Function):
    """The eager way, straight to kernels and transfers."""

    @staticmethod
    def forward(ctx: Any, call: RowCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, ctx.needs_input_grad[1:], x, weight, bias)
        ctx.call = call
        return row_forward("row_linear", call, x, weight, bias)

    @staticmethod
    @first_order("row_linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[1:])
        dx, dw, db = _gradients(ctx.call, needs, dy, *ctx.saved_tensors)
        return None, dx, dw, None if db is None else db.to(ctx.bias_dtype)


def _save(ctx: Any, needs: tuple[bool, ...], x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    needs_dx, needs_dw, *_ = needs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)


@all_or_fail
def row_forward(op: str, call: RowCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    steps = steps_on(x.device)
    if call.group.size() == 1:
        return steps.linear(x, weight, bias, "none", False)[0]
    return start_sum(
        op,
        lambda rows: steps.linear(x[rows], weight, None, "none", False)[0],
        x.shape[0],
        weight.shape[0],
        x,
        call.group,
        scatter=call.sequence_parallel,
        overlap=call.overlap,
        bias=bias,
    ).wait()


@all_or_fail
def _gradients(
    call: RowCall, needs: tuple[bool, ...], dy_shard: Tensor, x: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dw, db); db in fp32"""
    steps = steps_on(dy_shard.device)
    if call.sequence_parallel:
        compare_in_backward("row_linear backward", call.group, needs)
    *_, needs_db = needs  # x and weight are None where nobody needs what they are for
    dx = dw = None
    if call.sequence_parallel and call.group.size() > 1:
        gathering = start_rows("row_linear backward", "gather of dy", dy_shard, call.group)
        if multiplying(gathering, call.overlap) and weight is not None:
            ((dx, _),) = gathering.products([weight.t()], [None], "none", False, keep_rows=True)
            dy = gathering.wait()
            dw = weight_gradient(steps, dy, x, call.main_grad) if x is not None else None
            return dx, dw, steps.bias_grad(dy) if needs_db else None
        if weight is not None:
            dx = dy_shard.new_empty(dy_shard.shape[0] * call.group.size(), weight.shape[1])
        summing = WeightGradient(call.main_grad)
        for rows, dy_part in arrivals(gathering, call.overlap):
            if dx is not None and weight is not None:
                dx[rows] = steps.dgrad(dy_part, weight)
            if x is not None:  # of these rows at once: the next ones may not be there yet
                summing.add(steps, dy_part, x[rows])
        dy = gathering.wait()
        dw = summing.get() if x is not None else None
    else:
        dy = dy_shard
        dx = steps.dgrad(dy, weight) if weight is not None else None
        dw = weight_gradient(steps, dy, x, call.main_grad) if x is not None else None
    return dx, dw, steps.bias_grad(dy) if needs_db else None


# Under torch.compile: both directions as operators, which name their group.


@torch.library.custom_op("tpkernels::row_linear", mutates_args=())
def registered_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    sequence_parallel: bool,
    overlap: bool,
) -> Tensor:
    call = RowCall(group_named(group_name), sequence_parallel, overlap)
    return row_forward("row_linear", call, x, weight, bias)


@registered_row_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *options: Any,
) -> Tensor:
    ranks = _ranks_that_split(*options)
    return x.new_empty(x.shape[0] // ranks, weight.shape[0])


def _ranks_that_split(group_name: str, sequence_parallel: bool, *_: bool) -> int:
    """How many ranks share the rows of y."""
    return group_named(group_name).size() if sequence_parallel else 1


@torch.library.custom_op("tpkernels::row_linear_backward", mutates_args=())
def registered_row_linear_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: Sequence[bool],
    wide: bool,
    group_name: str,
    sequence_parallel: bool,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """wide: dw as it was summed, in fp32 or wider"""
    into = None if x is None else sum_for(dy, x, wide=wide)
    call = RowCall(group_named(group_name), sequence_parallel, overlap, into)
    dx, dw, db = _gradients(call, tuple(needs), dy, x, weight)
    return or_empty(dx, dy), or_empty(dw if into is None else into, dy), or_empty(db, dy)


@registered_row_linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: Sequence[bool],
    wide: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    ranks = _ranks_that_split(*options)
    dtype = dtype_of_sums(dy) if wide and x is not None else dy.dtype
    return (
        dy.new_empty(0 if weight is None else (dy.shape[0] * ranks, weight.shape[1])),
        dy.new_empty(0 if x is None else (dy.shape[1], x.shape[1]), dtype=dtype),
        dy.new_empty(dy.shape[1], dtype=dtype_of_sums(dy)) if needs[2] else dy.new_empty(0),
    )


def _registered_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.options = inputs
    ctx.wide = False
    _save(ctx, ctx.needs_input_grad, x, weight, bias)


def _registered_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    dx, dw, db = registered_row_linear_backward(dy, *ctx.saved_tensors, needs, ctx.wide, *ctx.options)
    return (
        dx if needs[0] else None,
        dw if needs[1] else None,
        db.to(ctx.bias_dtype) if needs[2] else None,
        None,
        None,
        None,
    )


registered_row_linear.register_autograd(_registered_backward, setup_context=_registered_save)
accumulating_row_linear = with_main_grad(registered_row_linear, _registered_save, _registered_backward)
