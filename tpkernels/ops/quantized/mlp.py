"""Up-projection, activation or gated unit, down-projection in fp8, over ranks or on one.

T tokens, K features in, F features between, N features out; see `column_linear` and `row_linear` here:

    forward   z = x w_upᵀ + b_up (and the gate's),  h = act(z) or f(g) * u in fp32,  y = ĥ ŵ_downᵀ + b_down
    backward  dh, dw_down, db_down as of `row_linear`;  dz = dh * act'(z), or dg and du
              dx, dw_up, db_up (and the gate's) as of `column_linear`

Saved for backward: x (its fp8 rows where they are gathered) unless the weights up are frozen, z or g and u,
and the weights; h is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.scaled import words_of
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context
from tpkernels.ops.main_grad import MainGrads, add_if_traced, empty_weight_gradient
from tpkernels.ops.quantized.column_linear import column_forward, column_gradients
from tpkernels.ops.quantized.glu import between, between_gradients
from tpkernels.ops.quantized.limits import require_quantizable
from tpkernels.ops.quantized.row_linear import row_gradients, row_product
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel.operands import apply_distinct, recorded
from tpkernels.ops.tensor_parallel.parallel import compare_in_backward


def quantized_mlp(
    op: str,
    x: Tensor,
    ups: Sequence[Tensor],
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    main_grads: Sequence[Tensor | None],
    span: Span,
    activation: Activation,
    glu: Glu | None,
) -> Tensor:
    """(tokens, features). ups: the weight up, and for `glu` that of the gate behind it"""
    require_quantizable(op, span.recipe, x)
    options, weights = (span, activation, glu), [*ups, w_down]
    y: Tensor
    if recorded(x, b_up, b_down, *weights):
        y = apply_distinct(_QuantizedMlp, options, main_grads, tensors=[x, b_up, b_down, *weights])
    else:
        y = mlp_forward(x, b_up, b_down, weights, *options, False)[0]
    return y


class _QuantizedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[Span, Activation, Glu | None],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        y, *kept = mlp_forward(x, b_up, b_down, weights, *options, True)
        rows = kept.pop() if options[0].token_shards > 1 else x
        ctx.options, ctx.main_grads = (x.shape[1], *options), main_grads
        needs_ups = ctx.needs_input_grad[5:-1]
        ctx.save_for_backward(rows if any(needs_ups) else None, *weights, *kept)
        return y

    @staticmethod
    @first_order("mlp in fp8", reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(ctx.main_grads), ctx.main_grads
        x, *saved = ctx.saved_tensors
        weights, zs = saved[:count], saved[count:]
        dx, db_up, db_down, *dws = mlp_gradients(
            ctx.needs_input_grad[2:], dy, x, weights, zs, main_grads, *ctx.options
        )
        return None, None, dx, db_up, db_down, *add_if_traced(main_grads, dws)


@all_or_fail
def _mlp_forward(
    x: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    span: Span,
    activation: Activation,
    glu: Glu | None,
    keep: bool,
) -> list[Tensor]:
    """y; if keep, z, or u and g, and the words of an x that was gathered. weights: up, (gate,) down"""
    *ups, w_down = weights
    biases = [b_up, *[None] * (len(ups) - 1)]
    results = column_forward(x, ups, biases, span, "none", False, keep)
    h = span.between(results[: len(ups)], activation, glu)
    return [row_product(h, w_down, b_down, span, x.dtype), *(results if keep else [])]


def _mlp_shapes(
    x: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    span: Span,
    activation: Activation,
    glu: Glu | None,
    keep: bool,
) -> list[Tensor]:
    *ups, w_down = weights
    shapes = [x.new_empty(x.shape[0], w_down.shape[0])]
    if keep:
        shapes += [x.new_empty(x.shape[0] * span.token_shards, weight.shape[0]) for weight in ups]
    if keep and span.token_shards > 1:
        words = words_of(x.shape[1], span.recipe.scaling)
        shapes.append(x.new_empty(x.shape[0], words, dtype=torch.int32))
    return shapes


mlp_forward = Operator("quantized_mlp", _mlp_forward, _mlp_shapes)


@all_or_fail
def _mlp_gradients(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    features: int,
    span: Span,
    activation: Activation,
    glu: Glu | None,
) -> list[Tensor | None]:
    """dx, db_up, db_down, dw of each weight. needs: in this order, too; x: as of `column_gradients`"""
    *ups, w_down = weights
    needs_dx, needs_db_up, needs_db_down, *needs_ups, needs_down = needs
    if span.group is not None:
        compare_in_backward("parallel_mlp backward", span.group, needs)
    needs_dh = needs_dx or needs_db_up or any(needs_ups)
    h = between(zs, activation, glu) if needs_down else None
    dh, dw_down, db_down = row_gradients(
        (needs_dh, needs_down, needs_db_down),
        *(dy_shard, h, w_down if needs_dh else None, main_grads[-1:], span),
    )
    dx = db_up = None
    dws: Sequence[Tensor | None] = [None] * len(ups)
    if dh is not None:
        dzs = between_gradients(dh, zs, activation, glu)
        needed = [needs_dx, *needs_ups, needs_db_up, *[False] * (len(ups) - 1)]
        dx, *grads = column_gradients(
            *(needed, dzs, x, ups, [], main_grads[:-1], features, span, "none", False)
        )
        dws, db_up = grads[: len(ups)], grads[len(ups)]
    return [dx, db_up, db_down, *dws, dw_down]


def _mlp_gradient_shapes(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    features: int,
    *_: object,
) -> list[Tensor | None]:
    like = dy_shard.new_empty(0, features)
    products = [(z, like) for z in zs] + [(dy_shard, zs[0])]
    empty = [
        dy_shard.new_empty(dy_shard.shape[0], features),
        dy_shard.new_empty(zs[0].shape[1]),
        dy_shard.new_empty(dy_shard.shape[1]),
        *(empty_weight_gradient(dz, of, into) for (dz, of), into in zip(products, main_grads, strict=True)),
    ]
    return [gradient if need else None for gradient, need in zip(empty, needs, strict=True)]


mlp_gradients = Operator("quantized_mlp_backward", _mlp_gradients, _mlp_gradient_shapes)
