"""Column-parallel linear in fp8, or linear on one rank. See `ops.tensor_parallel.column_linear` and `span`.

R ranks, T tokens, K in_features, N out_features; ^ marks rows in fp8:

    forward   x̂ = all_gather(quantize(x_shard)),  z = x̂ ŵᵀ + b,  y = act(z)      rows as they arrive
    dz        dy * act'(z)
    dgrad     dx_shard = reduce_scatter(quantize(dz) w̃)                          sums travel in 16 bits
    wgrad     dw = dzᵀ x                                                         of x̂ where x was gathered
    dbias     db = dz.sum(0)

Sums over ranks are not sent in fp8: R terms, each rounded to 4 bits, are off as much as each of them is, and
that would be the gradient itself, not an operand that many products average out.

Saved for backward: x_shard, or its fp8 rows where they are gathered (with save_gathered all of them); the
weights; z where there is an activation. What no gradient needs is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.activations import Activation, act_grad_ref
from tpkernels.kernels.scaled import Scaled, words_of
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context
from tpkernels.ops.main_grad import MainGrads, add_if_traced, empty_weight_gradient
from tpkernels.ops.quantized.limits import require_quantizable
from tpkernels.ops.quantized.span import Span, product_into, rounded
from tpkernels.ops.tensor_parallel.operands import apply_distinct, bias_gradient, recorded
from tpkernels.ops.tensor_parallel.parallel import Done, compare_in_backward


def quantized_column_linear(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    main_grads: Sequence[Tensor | None],
    span: Span,
    activation: Activation,
    save_gathered: bool = False,
) -> Sequence[Tensor]:
    """y of each weight: (tokens, features). x: (tokens, features), checked and cast"""
    require_quantizable(op, span.recipe, x)
    if not recorded(x, *weights, *biases):
        return column_forward(x, weights, biases, span, activation, False, False)
    options = span, activation, save_gathered and span.token_shards > 1
    ys: Sequence[Tensor] = apply_distinct(
        _QuantizedColumnLinear, options, main_grads, tensors=[x, *weights, *biases]
    )
    return ys


class _QuantizedColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[Span, Activation, bool],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        count, (span, activation, keep_rows) = len(main_grads), options
        weights, biases = parameters[:count], parameters[count:]  # some biases may be None
        _, _, needs_dx, *needs = ctx.needs_input_grad
        keep_rows = keep_rows and any(needs[:count])
        results = column_forward(x, weights, biases, span, activation, keep_rows, keep=True)
        kept = results.pop() if span.token_shards > 1 else x
        ctx.main_grads, ctx.options = main_grads, (x.shape[1], span, activation, keep_rows)
        ctx.save_for_backward(
            kept if any(needs[:count]) else None,
            *(weights if needs_dx else [None] * count),
            *results[count:],
        )
        return tuple(results[:count])

    @staticmethod
    @first_order("linear in fp8", reads_intermediates=True)
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
    span: Span,
    activation: Activation,
    keep_rows: bool,
    keep: bool,
) -> list[Tensor]:
    """y of each weight; if keep, z of each where there is an activation, and of an x that was gathered the
    words: our rows, or all of them if keep_rows.
    """
    keep_z = keep and activation != "none"
    own, narrowest = span.activations(x), min(weight.shape[0] for weight in weights)
    gathering = span.gather("column_linear", "x", own, features=narrowest)
    scaled = [span.rows(weight) for weight in weights]

    def multiply(chunk: Scaled, ys_and_zs: list[Tensor]) -> None:
        for i, (weight, bias) in enumerate(zip(scaled, biases, strict=True)):
            product_into(ys_and_zs[i :: len(weights)], chunk, weight, bias, activation, keep_z)

    widths = [weight.shape[0] for weight in weights] * (2 if keep_z else 1)
    results = span.rowwise(gathering, own, widths, x.dtype, multiply)
    if keep and span.token_shards > 1:
        results.append(gathering.wait() if keep_rows else own.words)
    return results


def _column_shapes(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    span: Span,
    activation: Activation,
    keep_rows: bool,
    keep: bool,
) -> list[Tensor]:
    tokens = x.shape[0] * span.token_shards
    widths = [weight.shape[0] for weight in weights] * (2 if keep and activation != "none" else 1)
    shapes = [x.new_empty(tokens, width) for width in widths]
    if keep and span.token_shards > 1:
        words = words_of(x.shape[1], span.recipe.scaling)
        shapes.append(x.new_empty(tokens if keep_rows else x.shape[0], words, dtype=torch.int32))
    return shapes


column_forward = Operator("quantized_column_linear", _column_forward, _column_shapes)


@all_or_fail
def _column_gradients(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor | None],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    features: int,
    span: Span,
    activation: Activation,
    kept_rows: bool,
) -> list[Tensor | None]:
    """dx, dw of each weight, db of each.

    x: itself, or words where tokens are split, of all if kept_rows; None where no dw is needed
    weights: None where dx is not needed; features: of x
    """
    op, count, dtype = "column_linear backward", len(weights), dys[0].dtype
    needs_dx, needs_dws, needs_dbs = needs[0], needs[1 : 1 + count], needs[1 + count :]
    if span.group is not None:
        compare_in_backward(op, span.group, needs)
    was_gathered, gathering = span.token_shards > 1, None
    if x is not None and any(needs_dws):
        own = Scaled(x, features, "e4m3", span.recipe.scaling)
        gathering = Done(x) if kept_rows or not was_gathered else span.gather(op, "x", own)
    dzs = [act_grad_ref(dy, z, activation) for dy, z in zip(dys, zs, strict=True)] if zs else dys
    summing = None
    if needs_dx:
        pairs = [
            (span.gradients(dz), span.columns(weight))
            for dz, weight in zip(dzs, weights, strict=True)
            if weight is not None  # none is
        ]
        summing = span.sum_of_products(op, pairs, dtype, hidden=any(needs_dws))
        if not span.overlap:
            summing = Done(summing.wait())
    dbs = [bias_gradient(dz) if need else None for dz, need in zip(dzs, needs_dbs, strict=True)]
    dws: list[Tensor | None] = [None] * count
    if gathering is not None:
        full = gathering.wait()
        if was_gathered:
            full = rounded(own.with_words(full), dtype)
        dws = [
            span.weight_gradient(dz, full, into) if need else None
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
    span: Span,
    *_: object,
) -> list[Tensor | None]:
    dy, like = dys[0], dys[0].new_empty(0, features)
    empty = [
        dy.new_empty(dy.shape[0] // span.token_shards, features),
        *(empty_weight_gradient(dy, like, into) for dy, into in zip(dys, main_grads, strict=True)),
        *(dy.new_empty(dy.shape[1]) for dy in dys),
    ]
    return [gradient if need else None for gradient, need in zip(empty, needs, strict=True)]


column_gradients = Operator("quantized_column_linear_backward", _column_gradients, _column_gradient_shapes)
