"""Column-parallel linear: each rank computes some of the features, for all tokens.

R ranks, T tokens, K in_features, N out_features:

    x_shard   (T / R, K)   this rank's tokens under sequence parallelism, else x (T, K) on every rank
    w_shard   (N / R, K)   b_shard  (N / R,)
    y_shard   (T, N / R)   all tokens, our features

    forward   z_shard  = all_gather(x_shard) w_shardᵀ + b_shard      rows as they arrive
              y_shard  = act(z_shard)
    dz        dz_shard = dy_shard * act'(z_shard)
    dgrad     dx_shard = reduce_scatter(dz_shard w_shard)            chunks travel while others are computed
    wgrad     dw_shard = dz_shardᵀ x                                 x is gathered again during dgrad
    dbias     db_shard = dz_shard.sum(0)                             no communication

Without sequence parallelism nothing is gathered, and dx is all-reduced. Several weights share one gather, and
the sum of their dx.

Saved for backward: x_shard (with save_gathered: x), the weights, and z_shard where there is an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.activations import Activation, act_grad_ref, require_activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, autocast, check_linear, features_of, is_casting, tokens_of
from tpkernels.ops.main_grad import (
    MainGrads,
    add_if_traced,
    check_main_grad,
    empty_weight_gradient,
)
from tpkernels.ops.quantized.column_linear import quantized_column_linear
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel.operands import (
    Layout,
    apply_distinct,
    bias_gradient,
    checked_layout,
    recorded,
    shaped_like,
)
from tpkernels.ops.tensor_parallel.parallel import Done, compare_in_backward, multiplying
from tpkernels.ops.tensor_parallel.segments import (
    Along,
    by_segment,
    map_segments,
    require_segments,
    segmented_weight_gradient,
)


@overload
def column_linear(
    x: Tensor,
    weight_shard: Tensor,
    bias_shard: Tensor | None,
    group: ProcessGroup,
    *,
    activation: Activation | None = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | None = None,
    save_gathered: bool = False,
    quantize: Recipe | None = None,
) -> Tensor: ...


@overload
def column_linear(
    x: Tensor,
    weight_shard: Sequence[Tensor],
    bias_shard: Sequence[Tensor | None] | None,
    group: ProcessGroup,
    *,
    activation: Activation | None = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Sequence[Tensor | None] | None = None,
    save_gathered: bool = False,
    quantize: Recipe | None = None,
) -> tuple[Tensor, ...]: ...


@from_entry
def column_linear(
    x: Tensor,
    weight_shard: Tensor | Sequence[Tensor],
    bias_shard: Tensor | Sequence[Tensor | None] | None,
    group: ProcessGroup,
    *,
    activation: Activation | None = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | Sequence[Tensor | None] | None = None,
    save_gathered: bool = False,
    quantize: Recipe | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """act(x weightᵀ + bias), of which this rank computes its features.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (out_features / R, in_features), or several such that share x
    bias_shard: (out_features / R,), or as many as there are weights
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    save_gathered: keep the gathered x for backward, instead of gathering it again
    quantize: compute it in fp8, and gather fp8
    returns: (tokens, ..., out_features / R); a tuple of them for several weights
    """
    op = "column_linear"
    activation = activation or "none"
    require_activation(op, activation)
    weights = [weight_shard] if isinstance(weight_shard, Tensor) else list(weight_shard)
    if not weights:
        raise ValueError(f"{op}: expected at least one weight_shard, got an empty list")
    biases = _listed(op, "bias_shard", bias_shard, len(weights))
    main_grads = _listed(op, "main_grad", main_grad, len(weights))
    layout = checked_layout(
        op,
        x,
        [*weights, *biases],
        group,
        sequence_parallel,
        overlap,
        (activation, save_gathered, quantize),
        width=x.shape[-1] if x.ndim else 0,
    )
    if is_casting(x):
        x, *others = autocast(x, *weights, *biases)
        weights, biases = others[: len(weights)], others[len(weights) :]
    features = features_of(op, x)
    for weight, bias, into in zip(weights, biases, main_grads, strict=True):
        check_linear(op, x, features, weight, bias, ("weight_shard", "bias_shard"))
        check_main_grad(op, into, weight)
        require_segments(op, layout.segments, [("rows of weight_shard", weight.shape[0])])
    ys: Sequence[Tensor]
    if quantize is not None:
        span, tokens = Span(layout.group, sequence_parallel, overlap, quantize), tokens_of(x)
        ys = quantized_column_linear(op, tokens, weights, biases, main_grads, span, activation, save_gathered)
    elif recorded(x, *weights, *biases):
        keep_rows = save_gathered and layout.token_shards > 1
        options, tensors = (layout, activation, keep_rows), [tokens_of(x), *weights, *biases]
        ys = apply_distinct(_ColumnLinear, options, main_grads, tensors=tensors)
    else:
        ys = column_forward(tokens_of(x), weights, biases, layout, activation, False, False)
    if x.ndim != 2:
        ys = [shaped_like(y, x, x.shape[0] * layout.token_shards) for y in ys]
    return ys[0] if isinstance(weight_shard, Tensor) else tuple(ys)


def _listed(
    op: str, name: str, values: Tensor | Sequence[Tensor | None] | None, count: int
) -> list[Tensor | None]:
    """One of these for every weight."""
    if values is None:
        return [None] * count
    listed: list[Tensor | None] = [values] if isinstance(values, Tensor) else list(values)
    if len(listed) != count:
        raise ValueError(
            f"{op}: expected as many of {name} as of weight_shard, {count}, got {len(listed)}; "
            "give None for a weight without"
        )
    return listed


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[Layout, Activation, bool],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        count, keep_rows = len(main_grads), options[-1]
        weights, biases = parameters[:count], parameters[count:]  # some biases may be None
        results = column_forward(x, weights, biases, *options, keep=True)
        ctx.options, ctx.main_grads = options, main_grads
        ctx.save_for_backward(results.pop() if keep_rows else x, *weights, *results[count:])
        return tuple(results[:count])

    @staticmethod
    @first_order("column_linear", reads_intermediates=True)
    def backward(ctx: Context, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(dys), ctx.main_grads
        x, *saved = ctx.saved_tensors
        weights, zs = saved[:count], saved[count:]
        dx, *grads = column_gradients(ctx.needs_input_grad[2:], dys, x, weights, zs, main_grads, *ctx.options)
        return None, None, dx, *add_if_traced(main_grads, grads[:count]), *grads[count:]


@all_or_fail
def _column_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layout: Layout,
    activation: Activation,
    keep_rows: bool,
    keep: bool,
) -> list[Tensor]:
    """y of each weight; if keep, z of each where there is an activation; the gathered x if keep_rows."""
    keep_z = keep and activation != "none"
    narrowest = min(weight.shape[0] for weight in weights)
    gathering = layout.gather("column_linear", "gather of x", layout.operand(x), features=narrowest)
    if multiplying(gathering, layout.overlap):
        products = gathering.products(weights, biases, activation, keep_z, keep_rows=keep_rows)
        results = _ys_and_zs(products)
    else:
        calls = layout.calls(x.device)

        def multiply(_: slice, chunk: Tensor, ys_and_zs: list[Tensor]) -> None:
            for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                y_and_z = [Along(each, 1) for each in ys_and_zs[i :: len(weights)]]
                split = Along(weight, 0), Along(bias, 0)
                by_segment(calls, primitives.linear, y_and_z, chunk, *split, activation, keep_z)

        widths = [weight.shape[0] for weight in weights] * (2 if keep_z else 1)
        results = layout.rowwise(gathering, x.shape[0] * layout.token_shards, widths, multiply)
    return [*results, gathering.wait()] if keep_rows else results


def _ys_and_zs(products: Iterable[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    ys, zs = zip(*products, strict=True)
    return [*ys, *(z for z in zs if z is not None)]


def _column_shapes(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layout: Layout,
    activation: Activation,
    keep_rows: bool,
    keep: bool,
) -> list[Tensor]:
    widths = [weight.shape[0] for weight in weights] * (2 if keep and activation != "none" else 1)
    widths += [x.shape[1]] if keep_rows else []
    return [x.new_empty(x.shape[0] * layout.token_shards, width) for width in widths]


column_forward = Operator("column_linear", _column_forward, _column_shapes)


@all_or_fail
def _column_gradients(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    layout: Layout,
    activation: Activation,
    kept_rows: bool,
) -> list[Tensor | None]:
    """dx, dw of each weight, db of each. needs: of x, the weights, the biases; kept_rows: x has all"""
    op, count = "column_linear backward", len(weights)
    needs_dx, needs_dws, needs_dbs = needs[0], needs[1 : 1 + count], needs[1 + count :]
    compare_in_backward(op, layout.group, needs)
    x, dys = layout.operand(x), [layout.operand(dy) for dy in dys]
    gathering = layout.gather(op, "gather of x", x, wanted=not kept_rows and any(needs_dws))
    calls, slope = layout.calls(x.device), partial(act_grad_ref, activation=activation)
    dzs = [map_segments(calls, slope, dy, z) for dy, z in zip(dys, zs, strict=True)] if zs else dys
    summing = None
    if needs_dx:
        pairs = list(zip(dzs, weights, strict=True))
        summing = layout.sum_of_products(op, pairs, transposed=False, hidden=any(needs_dws))
        if not layout.overlap:
            summing = Done(summing.wait())
    dbs = [bias_gradient(dz, calls) if need else None for dz, need in zip(dzs, needs_dbs, strict=True)]
    full_x = gathering.wait()
    dws = [
        segmented_weight_gradient(dz, full_x, into, calls, dim=0) if need else None
        for dz, into, need in zip(dzs, main_grads, needs_dws, strict=True)
    ]
    return [None if summing is None else summing.wait(), *dws, *dbs]


def _column_gradient_shapes(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    layout: Layout,
    *_: object,
) -> list[Tensor | None]:
    empty = [
        x.new_empty(dys[0].shape[0] // layout.token_shards, x.shape[1]),
        *(empty_weight_gradient(dy, x, into) for dy, into in zip(dys, main_grads, strict=True)),
        *(weight.new_empty(weight.shape[0]) for weight in weights),
    ]
    return [gradient if need else None for gradient, need in zip(empty, needs, strict=True)]


column_gradients = Operator("column_linear_backward", _column_gradients, _column_gradient_shapes)
