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

Saved for backward: z (or g and u), the weights, and x_shard if w_up or w_gate needs a gradient; h is computed
again. How products, and what lies between them, are computed: `ops.numerics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.activations import Activation, Glu, require_activation, require_glu
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    Context,
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
    asked_for,
    check_main_grad,
    empty_weight_gradient,
)
from tpkernels.ops.numerics import KeptRows
from tpkernels.ops.tensor_parallel.layout import Layout, apply_distinct, checked_layout, recorded
from tpkernels.ops.tensor_parallel.parallel import require_segments


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
    """Compute act(x w_upᵀ + b_up) w_downᵀ + b_down over a group, or the gated form with `w_gate_shard`.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    w_up_shard, w_gate_shard: (between / R, in_features)
    w_down_shard: (out_features, between / R)
    activation: gelu_tanh unless given; with w_gate_shard swiglu (the default), geglu or geglu_tanh
    main_grads: of w_up_shard, w_gate_shard (if gated) and w_down_shard: gradients are added there in place
    quantize: compute it in fp8, and gather fp8
    returns: like x, with out_features
    """
    op = "parallel_mlp"
    if w_gate_shard is None:
        activation = activation or "gelu_tanh"
        require_activation(op, activation)
    else:
        if b_up_shard is not None:
            raise ValueError(
                f"{op}: expected no b_up_shard with w_gate_shard, a gated unit has no biases; pass None"
            )
        activation = activation or "swiglu"
        require_glu(op, activation)
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
        (activation, w_gate is not None, b_down is not None, quantize),
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
    ups = [w_up] if w_gate is None else [w_up, w_gate]
    weights = [*ups, w_down]
    for main_grad, weight in zip(into, weights, strict=True):
        check_main_grad(op, main_grad, weight)
    require_segments(op, layout.numerics.segments, "rows of w_up_shard", w_up.shape[0])
    layout = layout.in_fp8(op, quantize, x)
    return like_tokens(up_and_down(op, tokens_of(x), ups, b_up, w_down, b_down, into, layout, activation), x)


def up_and_down(
    op: str,
    x: Tensor,
    ups: Sequence[Tensor],
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    main_grads: Sequence[Tensor | None],
    layout: Layout,
    unit: Activation | Glu,
) -> Tensor:
    """Compute the MLP of x, (tokens, features), checked and cast. ups: the weight up, then that of a gate"""
    weights = [*ups, w_down]
    if not recorded(x, b_up, b_down, *weights):
        return mlp_forward(x, b_up, b_down, weights, layout, unit, False, "none")[0]
    tensors = [x, b_up, b_down, *weights]
    y: Tensor = apply_distinct(_ParallelMlp, (op, layout, unit), main_grads, tensors=tensors)
    return y


class _ParallelMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[str, Layout, Activation | Glu],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        (op, layout, unit), (*ups, w_down) = options, weights
        needs_dx, needs_dws = ctx.needs_input_grad[2], any(ctx.needs_input_grad[5:-1])  # dws of the ups
        kept = layout.kept() if needs_dws else "none"
        y, *zs = mlp_forward(x, b_up, b_down, weights, layout, unit, True, kept)
        rows = x if kept == "none" else zs.pop()
        saved_ups = ups if needs_dx else [None] * len(ups)
        ctx.save_for_backward(rows if needs_dws else None, *saved_ups, w_down, *zs)
        ctx.main_grads, ctx.op = main_grads, layout.numerics.named(op)
        ctx.options = x.shape[1], layout, unit, kept
        return y

    @staticmethod
    def spmd_typecheck(
        *,
        options: tuple[str, Layout, Activation | Glu],
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        weights: Sequence[Tensor],
    ) -> spmd_rules.Typed:
        layout, (*ups, w_down) = options[1], weights
        up, *gates = spmd_rules.column(x, ups, [b_up, *[None] * (len(ups) - 1)], layout)
        return spmd_rules.row(
            spmd_rules.einsum("tn,tn->tn", up, *gates) if gates else up, w_down, b_down, layout
        )

    @staticmethod
    @first_order(reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(ctx.main_grads), ctx.main_grads
        x, *saved = ctx.saved_tensors
        *ups, w_down = saved[:count]
        needs = ctx.needs_input_grad[2:]
        needs = (*needs[:-count], *asked_for(ctx, main_grads, needs[-count:], -count))
        operands = dy, x, ups, w_down, saved[count:]
        dx, db_up, db_down, *dws = mlp_gradients(needs, *operands, main_grads, *ctx.options)
        return None, None, dx, db_up, db_down, *add_if_traced(main_grads, dws)


@all_or_fail
def _mlp_forward(
    x: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    layout: Layout,
    unit: Activation | Glu,
    keep: bool,
    kept: KeptRows,
) -> list[Tensor]:
    """Compute y; if keep, return z, or u and g, and kept rows of x. weights: up, (gate,) down"""
    (*ups, w_down), numerics = weights, layout.numerics
    width = ups[0].shape[0]
    gathering = layout.gather("parallel_mlp", "x", x, numerics.activations, features=width, keep=False)
    h, zs = numerics.unit(gathering, ups, b_up, unit, keep)
    y = layout.sum_of_products("parallel_mlp", [(h, w_down)], transposed=True, bias=b_down).wait()
    return [y, *zs] if kept == "none" else [y, *zs, gathering.own()]


def _mlp_shapes(
    x: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    layout: Layout,
    unit: Activation | Glu,
    keep: bool,
    kept: KeptRows,
) -> list[Tensor]:
    *ups, w_down = weights
    tokens = x.shape[0] * layout.token_shards
    zs = [x.new_empty(tokens, weight.shape[0]) for weight in ups] if keep else []
    shapes = [x.new_empty(x.shape[0], w_down.shape[0]), *zs]
    return shapes if kept == "none" else [*shapes, layout.empty_kept(x, kept)]


mlp_forward = Operator("parallel_mlp", _mlp_forward, _mlp_shapes)


@all_or_fail
def _mlp_gradients(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    ups: Sequence[Tensor | None],
    w_down: Tensor,
    zs: Sequence[Tensor],
    main_grads: MainGrads,
    features: int,
    layout: Layout,
    unit: Activation | Glu,
    kept: KeptRows,
) -> list[Tensor | None]:
    """Compute dx, db_up, db_down, dw of each weight. needs: of these; other arguments: see `column_linear`"""
    op, numerics = "parallel_mlp backward", layout.numerics
    *into_ups, into_down = main_grads
    needs_dx, needs_db_up, needs_db_down, *needs_ups, needs_down = needs
    layout.compare_in_backward(op, needs)
    gathering_dy = layout.gather(op, "dy", dy_shard, numerics.gradients, features=w_down.shape[1])
    gathering_x = None
    if x is not None and any(needs_ups):
        gathering_x = layout.gather_kept(op, "x", x, kept, features, beside=gathering_dy)
    needs_dz = needs_dx or needs_db_up or any(needs_ups)
    h, dzs, db_up = numerics.unit_gradients(
        gathering_dy, w_down, zs, unit, (needs_down, needs_dz, needs_db_up)
    )
    gathering_dy.wait()  # also if nobody asks for dy: the call ends for all ranks alike
    dw_down = db_down = summing = None
    if needs_down or needs_db_down:
        dy = gathering_dy.numbers()
        if h is not None and needs_down:
            dw_down = numerics.weight_gradient(dy, h, into_down, split="x")
        db_down = numerics.bias_gradient(dy, split=False) if needs_db_down else None
    full_x = None if gathering_x is None else gathering_x.numbers()
    if needs_dx:
        pairs = [(numerics.gradients(dz), up) for dz, up in zip(dzs, ups, strict=True) if up is not None]
        summing = layout.sum_of_products(op, pairs, transposed=False, hidden=any(needs_ups))
    dws: list[Tensor | None] = [None] * len(ups)
    if full_x is not None:
        dws = [
            numerics.weight_gradient(dz, full_x, into, split="dy") if need else None
            for dz, into, need in zip(dzs, into_ups, needs_ups, strict=True)
        ]
    return [None if summing is None else summing.wait(), db_up, db_down, *dws, dw_down]


def _mlp_gradient_shapes(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    ups: Sequence[Tensor | None],
    w_down: Tensor,
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


mlp_gradients = Operator("parallel_mlp_backward", _mlp_gradients, _mlp_gradient_shapes)
