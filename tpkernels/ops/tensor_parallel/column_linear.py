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
the sum of their dx. On one rank without a group it is `ops.linear` in fp8.

Saved for backward: x_shard (with save_gathered: x) and the weights, if a gradient needs them; z_shard where
there is an activation. How products are computed: `ops.numerics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, autocast, check_linear, features_of, is_casting, tokens_of
from tpkernels.ops.main_grad import (
    MainGrads,
    add_if_traced,
    asked_for,
    check_main_grad,
    empty_weight_gradient,
)
from tpkernels.ops.numerics import KeptRows
from tpkernels.ops.tensor_parallel.layout import (
    Layout,
    apply_distinct,
    checked_layout,
    recorded,
    shaped_like,
)
from tpkernels.ops.tensor_parallel.parallel import Done, require_segments


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
    """Compute act(x weightᵀ + bias); each rank computes its own features.

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
    if activation != "none":
        require_activation(op, activation)
    weights = [weight_shard] if isinstance(weight_shard, Tensor) else list(weight_shard)
    if not weights:
        raise ValueError(f"{op}: expected at least one weight_shard, got an empty list")
    without: list[Tensor | None] = [None] * len(weights)
    biases = without if bias_shard is None else _listed(op, "bias_shard", bias_shard, len(weights))
    main_grads = without if main_grad is None else _listed(op, "main_grad", main_grad, len(weights))
    layout = checked_layout(
        op,
        x,
        [*weights, *biases],
        group,
        sequence_parallel,
        overlap,
        (activation, save_gathered, quantize),
    )
    if is_casting(x):
        x, *others = autocast(x, *weights, *biases)
        weights, biases = others[: len(weights)], others[len(weights) :]
    features = features_of(op, x)
    for weight, bias, into in zip(weights, biases, main_grads, strict=True):
        check_linear(op, x, features, weight, bias, ("weight_shard", "bias_shard"))
        if into is not None:
            check_main_grad(op, into, weight)
        if layout.numerics.segments:
            require_segments(op, layout.numerics.segments, "rows of weight_shard", weight.shape[0])
    if quantize is not None:
        layout = layout.in_fp8(op, quantize, x)
    if x.ndim == 2:
        ys = column(op, x, weights, biases, main_grads, layout, activation, save_gathered)
    else:
        ys = column(op, tokens_of(x), weights, biases, main_grads, layout, activation, save_gathered)
        ys = [shaped_like(y, x, x.shape[0] * layout.token_shards) for y in ys]
    return ys[0] if isinstance(weight_shard, Tensor) else tuple(ys)


def _listed(op: str, name: str, values: Tensor | Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """Return `values` as a list, one for each weight; an error if there are more or fewer."""
    listed: list[Tensor | None] = [values] if isinstance(values, Tensor) else list(values)
    if len(listed) != count:
        raise ValueError(
            f"{op}: expected as many of {name} as of weight_shard, {count}, got {len(listed)}; "
            "give None for a weight without"
        )
    return listed


def column(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    main_grads: Sequence[Tensor | None],
    layout: Layout,
    activation: Activation,
    save_gathered: bool = False,
) -> Sequence[Tensor]:
    """Compute y of each weight, (tokens, features). x: (tokens, features), checked and cast"""
    if not recorded(x, *weights, *biases):
        return column_forward(x, weights, biases, layout, activation, False, "none")
    options, tensors = (op, layout, activation, save_gathered), [x, *weights, *biases]
    ys: Sequence[Tensor] = apply_distinct(_ColumnLinear, options, main_grads, tensors=tensors)
    return ys


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[str, Layout, Activation, bool],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        count, (op, layout, activation, save_gathered) = len(main_grads), options
        weights, biases = parameters[:count], parameters[count:]  # some biases may be None
        needs_dx, needs_dws = ctx.needs_input_grad[2], any(ctx.needs_input_grad[3 : 3 + count])
        kept = layout.kept(save_gathered) if needs_dws else "none"
        results = column_forward(x, weights, biases, layout, activation, True, kept)
        rows = x if kept == "none" else results.pop()
        zs = results[count:]
        ctx.reads_intermediates = bool(zs) or kept != "none"
        saved_weights = weights if needs_dx else [None] * count
        ctx.save_for_backward(rows if needs_dws else None, *saved_weights, *zs)
        ctx.main_grads, ctx.op = main_grads, layout.numerics.named(op)
        ctx.options = x.shape[1], layout, activation, kept
        return tuple(results[:count])

    @staticmethod
    def spmd_typecheck(
        *, options: tuple[str, Layout, Activation, bool], x: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[spmd_rules.Typed, ...]:
        count = len(parameters) // 2
        return tuple(spmd_rules.column(x, parameters[:count], parameters[count:], options[1]))

    @staticmethod
    @first_order(reads_intermediates=None)
    def backward(ctx: Context, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(dys), ctx.main_grads
        x, *saved = ctx.saved_tensors
        weights, zs = saved[:count], saved[count:]
        needs_dx, *needs = ctx.needs_input_grad[2:]
        needs = [needs_dx, *asked_for(ctx, main_grads, needs[:count], 1), *needs[count:]]
        dx, *grads = column_gradients(needs, dys, x, weights, zs, main_grads, *ctx.options)
        return None, None, dx, *add_if_traced(main_grads, grads[:count]), *grads[count:]


@all_or_fail
def _column_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layout: Layout,
    activation: Activation,
    keep: bool,
    kept: KeptRows,
) -> list[Tensor]:
    """Compute y of each weight; if keep, return z of each, if there is an activation; and kept rows of x."""
    narrowest = min([weight.shape[0] for weight in weights])
    gathering = layout.gather(
        "column_linear", "x", x, layout.numerics.activations, features=narrowest, keep=kept == "all"
    )
    results = gathering.products(weights, biases, activation, keep and activation != "none")
    return results if kept == "none" else [*results, gathering.wait() if kept == "all" else gathering.own()]


def _column_shapes(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layout: Layout,
    activation: Activation,
    keep: bool,
    kept: KeptRows,
) -> list[Tensor]:
    widths = [weight.shape[0] for weight in weights] * (2 if keep and activation != "none" else 1)
    shapes = [x.new_empty(x.shape[0] * layout.token_shards, width) for width in widths]
    return shapes if kept == "none" else [*shapes, layout.empty_kept(x, kept)]


column_forward = Operator("column_linear", _column_forward, _column_shapes)


@all_or_fail
def _column_gradients(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor | None],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    features: int,
    layout: Layout,
    activation: Activation,
    kept: KeptRows,
) -> list[Tensor | None]:
    """Compute dx, dw of each weight, db of each. needs: of x, the weights, the biases

    x: or its rows that were kept; None if no dw is needed, as weights are if dx is not
    features: of x
    """
    op, count, numerics = "column_linear backward", len(weights), layout.numerics
    needs_dx, needs_dws, needs_dbs = needs[0], needs[1 : 1 + count], needs[1 + count :]
    layout.compare_in_backward(op, needs)
    gathering = summing = None
    if x is not None and any(needs_dws):
        gathering = layout.gather_kept(op, "x", x, kept, features)
    dzs = [numerics.act_gradient(dy, z, activation) for dy, z in zip(dys, zs, strict=True)] if zs else dys
    if needs_dx:
        pairs = [(numerics.gradients(dz), w) for dz, w in zip(dzs, weights, strict=True) if w is not None]
        summing = layout.sum_of_products(op, pairs, transposed=False, hidden=any(needs_dws))
        if not layout.overlap:
            summing = Done(summing.wait())
    dbs = [
        numerics.bias_gradient(dz, split=True) if need else None
        for dz, need in zip(dzs, needs_dbs, strict=True)
    ]
    dws: list[Tensor | None] = [None] * count
    if gathering is not None:
        full_x = gathering.numbers()
        dws = [
            numerics.weight_gradient(dz, full_x, into, split="dy") if need else None
            for dz, into, need in zip(dzs, main_grads, needs_dws, strict=True)
        ]
    return [None if summing is None else summing.wait(), *dws, *dbs]


def _column_gradient_shapes(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor | None],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    features: int,
    layout: Layout,
    *_: object,
) -> list[Tensor | None]:
    dy, like = dys[0], dys[0].new_empty(0, features)
    empty = [
        dy.new_empty(dy.shape[0] // layout.token_shards, features),
        *(empty_weight_gradient(dy, like, into) for dy, into in zip(dys, main_grads, strict=True)),
        *(dy.new_empty(dy.shape[1]) for dy in dys),
    ]
    return [gradient if need else None for gradient, need in zip(empty, needs, strict=True)]


column_gradients = Operator("column_linear_backward", _column_gradients, _column_gradient_shapes)
