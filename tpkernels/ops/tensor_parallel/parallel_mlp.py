"""Column-parallel up-projection, activation, row-parallel down-projection as one differentiable operator.

R ranks, T tokens, K features in, F features between, N features out:

    x_shard       (T / R, K)   our tokens under sequence parallelism, else x (T, K)
    w_up_shard    (F / R, K)   w_gate_shard as well;  b_up_shard  (F / R,)
    w_down_shard  (N, F / R)   b_down  (N,)
    y_shard       (T / R, N)   our tokens under sequence parallelism, else y (T, N)

    forward   z = all_gather(x_shard) w_upᵀ + b_up,  h = act(z)      rows as they arrive
              y_shard = reduce_scatter(h w_downᵀ) + b_down           chunks travel while others are computed
    backward  dz = (all_gather(dy_shard) w_down) * act'(z)           rows as they arrive: dh is never written
              dw_down = dyᵀ act(z),  db_down = dy.sum(0)             hide the gather of x
              dx_shard = reduce_scatter(dz w_up)                     chunks travel while others are computed,
              dw_up = dzᵀ x,  db_up = dz.sum(0)                      and during dw_up

With w_gate_shard z is the pair (g, u), h = f(g) * u, and dx sums both. Without sequence parallelism y and dx
are all-reduced and nothing is gathered.

Saved for backward: x_shard, z (or g and u) and the weights; h is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Operator
from tpkernels.dispatch.products import sums_dtype
from tpkernels.kernels.activations import (
    Activation,
    Glu,
    act_into,
    act_ref,
    require_activation,
    require_glu,
)
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    Context,
    as_dtype,
    autocast,
    check_linear,
    features_of,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.main_grad import (
    MainGrads,
    add_if_traced,
    check_main_grad,
    empty_weight_gradient,
)
from tpkernels.ops.quantized.mlp import quantized_mlp
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel.operands import (
    Layout,
    apply_distinct,
    bias_gradient,
    checked_layout,
    recorded,
)
from tpkernels.ops.tensor_parallel.parallel import compare_in_backward, multiplying
from tpkernels.ops.tensor_parallel.product_sum import rows_of
from tpkernels.ops.tensor_parallel.segments import (
    Along,
    by_segment,
    map_segments,
    require_segments,
    segmented_weight_gradient,
)


@from_entry
def parallel_mlp(
    x: Tensor,
    w_up_shard: Tensor,
    b_up_shard: Tensor | None,
    w_down_shard: Tensor,
    b_down: Tensor | None,
    group: ProcessGroup,
    *,
    activation: Activation | Glu | None = None,
    w_gate_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grads: Sequence[Tensor | None] | None = None,
    quantize: Recipe | None = None,
) -> Tensor:
    """act(x w_upᵀ + b_up) w_downᵀ + b_down over the ranks of a group, or the gated form with `w_gate_shard`.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    w_up_shard, w_gate_shard: (between / R, in_features)
    w_down_shard: (out_features, between / R)
    activation: gelu_tanh unless given; with w_gate_shard swiglu (the default), geglu or geglu_tanh
    main_grads: of w_up_shard, w_gate_shard (if gated) and w_down_shard: gradients are added there in place
    quantize: compute it in fp8, and gather fp8
    returns: like x, with out_features
    """
    op = "parallel_mlp"
    glu: Glu | None = None
    if w_gate_shard is None:
        activation = cast("Activation", activation or "gelu_tanh")
        require_activation(op, activation)
    else:
        if b_up_shard is not None:
            raise ValueError(
                f"{op}: expected no b_up_shard with w_gate_shard, a gated unit has no biases; pass None"
            )
        glu, activation = cast("Glu", activation or "swiglu"), "none"
        require_glu(op, glu)
    w_up, b_up, w_down, w_gate = w_up_shard, b_up_shard, w_down_shard, w_gate_shard
    count = 2 if w_gate is None else 3
    into = [None] * count if main_grads is None else list(main_grads)
    if len(into) != count:
        raise ValueError(f"{op}: expected {count} main_grads, one for each weight, got {len(into)}")
    layout = checked_layout(
        op,
        x,
        [w_up, w_gate, w_down, b_up, b_down],
        group,
        sequence_parallel,
        overlap,
        (glu or activation, w_gate is not None, b_down is not None, quantize),
        width=w_down.shape[0],
    )
    if is_casting(x):
        x, w_up, b_up, w_down, b_down, w_gate = autocast(x, w_up, b_up, w_down, b_down, w_gate)
    check_linear(op, x, features_of(op, x), w_up, b_up, ("w_up_shard", "b_up_shard"))
    if w_gate is not None:
        check_linear(op, x, features_of(op, x), w_gate, None, ("w_gate_shard", ""))
        if w_gate.shape != w_up.shape:
            raise ValueError(
                f"{op}: expected w_gate_shard and w_up_shard of one shape, got {tuple(w_gate.shape)} and "
                f"{tuple(w_up.shape)}"
            )
    check_linear(op, x, w_up.shape[0], w_down, b_down, ("w_down_shard", "b_down"))
    weights = [w_up, w_down] if w_gate is None else [w_up, w_gate, w_down]
    for main_grad, weight in zip(into, weights, strict=True):
        check_main_grad(op, main_grad, weight)
    require_segments(op, layout.segments, [("rows of w_up_shard", w_up.shape[0])])
    y: Tensor
    if quantize is not None:
        span = Span(layout.group, sequence_parallel, overlap, quantize)
        y = quantized_mlp(op, tokens_of(x), weights[:-1], b_up, w_down, b_down, into, span, activation, glu)
    elif recorded(x, b_up, b_down, *weights):
        options, tensors = (layout, activation, glu), [tokens_of(x), b_up, b_down, *weights]
        y = apply_distinct(_ParallelMlp, options, into, tensors=tensors)
    else:
        y = mlp_forward(tokens_of(x), b_up, b_down, weights, layout, activation, glu, False)[0]
    return like_tokens(y, x)


class _ParallelMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[Layout, Activation, Glu | None],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        y, *kept = mlp_forward(x, b_up, b_down, weights, *options, keep=True)
        ctx.options, ctx.main_grads = options, main_grads
        ctx.save_for_backward(x, *weights, *kept)
        return y

    @staticmethod
    @first_order("parallel_mlp", reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(ctx.main_grads), ctx.main_grads
        x, *saved = ctx.saved_tensors
        weights, kept = saved[:count], saved[count:]
        dx, db_up, db_down, *dws = mlp_gradients(
            ctx.needs_input_grad[2:], dy, x, weights, kept, main_grads, *ctx.options
        )
        return None, None, dx, db_up, db_down, *add_if_traced(main_grads, dws)


@all_or_fail
def _mlp_forward(
    x: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    layout: Layout,
    activation: Activation,
    glu: Glu | None,
    keep: bool,
) -> list[Tensor]:
    """y; if keep, z, or g and u. weights: up, (gate,) down; glu: in place of the activation"""
    op = "parallel_mlp"
    *ups, w_down = weights
    apart = keep and (glu is not None or activation != "none")  # else z is h
    gathering = layout.gather(op, "gather of x", layout.operand(x), features=ups[0].shape[0])
    if glu is None and multiplying(gathering, layout.overlap):
        ((h, z),) = gathering.products(ups, [b_up], activation, apart, keep_rows=False)
        kept = [] if z is None else [z]
    else:
        calls, up = layout.calls(x.device), Along(ups[0], 0)

        def multiply(_: slice, chunk: Tensor, h_and_kept: list[Tensor]) -> None:
            out = [Along(each, 1) for each in h_and_kept]
            if glu is None:
                by_segment(calls, primitives.linear, out, chunk, up, Along(b_up, 0), activation, apart)
            else:
                by_segment(calls, primitives.glu, out, chunk, Along(ups[1], 0), up, glu, apart)

        widths = [w_down.shape[1]] * (1 + len(ups) * apart)
        h, *kept = layout.rowwise(gathering, x.shape[0] * layout.token_shards, widths, multiply)
    y = layout.sum_of_products(op, [(h, w_down)], transposed=True, bias=b_down).wait()
    return [y, *(kept if apart or not keep else [h])]


def _mlp_shapes(
    x: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    layout: Layout,
    activation: Activation,
    glu: Glu | None,
    keep: bool,
) -> list[Tensor]:
    *ups, w_down = weights
    tokens = x.shape[0] * layout.token_shards
    kept = [x.new_empty(tokens, weight.shape[0]) for weight in ups] if keep else []
    return [x.new_empty(x.shape[0], w_down.shape[0]), *kept]


mlp_forward = Operator("parallel_mlp", _mlp_forward, _mlp_shapes)


@all_or_fail
def _mlp_gradients(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    main_grads: MainGrads,
    layout: Layout,
    activation: Activation,
    glu: Glu | None,
) -> list[Tensor | None]:
    """dx, db_up, db_down, dw of each weight. needs: in this order, too"""
    op = "parallel_mlp backward"
    *ups, w_down = weights
    *into_ups, into_down = main_grads
    needs_dx, needs_db_up, needs_db_down, *needs_ups, needs_down = needs
    compare_in_backward(op, layout.group, needs)
    x, dy_shard = layout.operand(x), layout.operand(dy_shard)
    gathering_dy = layout.gather(op, "gather of dy", dy_shard, features=w_down.shape[1])
    gathering_x = layout.gather(op, "gather of x", x, wanted=any(needs_ups))
    tokens = kept[0].shape[0]
    dbs_up: list[Tensor] = []
    calls, down = layout.calls(x.device), Along(w_down, 1)
    sums_as_they_come = needs_db_up and not layout.segments  # else in one order of tokens

    def multiply(rows: slice, dy_chunk: Tensor, h_and_dzs: list[Tensor]) -> None:
        """h, and dz of each weight but the last."""
        h, *dzs = (Along(each, 1) for each in h_and_dzs)
        saved = [rows_of(tensor, rows) for tensor in kept]
        if glu is not None:
            g_and_u = (Along(tensor, 1) for tensor in saved)
            by_segment(calls, primitives.dglu, (*reversed(dzs), h), dy_chunk, down, *g_and_u, glu)
            return
        (z,) = saved
        if sums_as_they_come:
            dbs_up.append(h_and_dzs[0].new_empty(w_down.shape[1], dtype=sums_dtype(x.dtype)))
        dz_and_db = (*dzs, *(Along(db, 0) for db in dbs_up[-1:]))
        undone = Along(z, 1), activation, sums_as_they_come
        by_segment(calls, primitives.dgrad_act, dz_and_db, dy_chunk, down, *undone)
        if calls:
            h_and_dzs[0].copy_(map_segments(calls, partial(act_ref, activation=activation), z))
        else:
            act_into(h_and_dzs[0], z, activation)

    h, *dzs = layout.rowwise(gathering_dy, tokens, [w_down.shape[1]] * (1 + len(ups)), multiply)
    dy = gathering_dy.wait()
    dw_down = segmented_weight_gradient(dy, h, into_down, calls, dim=1) if needs_down else None
    db_down = bias_gradient(dy) if needs_db_down else None
    db_up = as_dtype(sum(dbs_up[1:], dbs_up[0]), dy.dtype) if dbs_up else None
    if needs_db_up and not dbs_up:
        db_up = bias_gradient(dzs[0], calls)
    full_x = gathering_x.wait()
    summing = None
    if needs_dx:
        pairs = list(zip(dzs, ups, strict=True))
        summing = layout.sum_of_products(op, pairs, transposed=False, hidden=any(needs_ups))
    dws = [
        segmented_weight_gradient(dz, full_x, into, calls, dim=0) if need else None
        for dz, into, need in zip(dzs, into_ups, needs_ups, strict=True)
    ]
    return [None if summing is None else summing.wait(), db_up, db_down, *dws, dw_down]


def _mlp_gradient_shapes(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    main_grads: MainGrads,
    *_: object,
) -> list[Tensor | None]:
    products = [(z, x) for z in kept] + [(dy_shard, kept[0])]
    empty = [
        x.new_empty(x.shape),
        x.new_empty(kept[0].shape[1]),
        x.new_empty(dy_shard.shape[1]),
        *(empty_weight_gradient(dz, of, into) for (dz, of), into in zip(products, main_grads, strict=True)),
    ]
    return [gradient if need else None for gradient, need in zip(empty, needs, strict=True)]


mlp_gradients = Operator("parallel_mlp_backward", _mlp_gradients, _mlp_gradient_shapes)
