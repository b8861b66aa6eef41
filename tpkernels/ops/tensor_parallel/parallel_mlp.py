"""Column-parallel up-projection, activation, row-parallel down-projection as one differentiable operator.

R ranks, T tokens, K features in, F features between, N features out:

    x_shard       (T / R, K)   our tokens under sequence parallelism, else x (T, K)
    w_up_shard    (F / R, K)   w_gate_shard as well;  b_up_shard  (F / R,)
    w_down_shard  (N, F / R)   b_down  (N,)
    y_shard       (T / R, N)   our tokens under sequence parallelism, else y (T, N)

    forward   z = all_gather(x_shard) w_upᵀ + b_up,  h = act(z)      rows as they arrive
              y_shard = reduce_scatter(h w_downᵀ) + b_down           pieces travel while others are computed
    backward  dz = (all_gather(dy_shard) w_down) * act'(z)           rows as they arrive: dh is never written
              dw_down = dyᵀ act(z),  db_down = dy.sum(0)             hide the gather of x
              dx_shard = reduce_scatter(dz w_up)                     pieces travel while others are computed,
              dw_up = dzᵀ x,  db_up = dz.sum(0)                      and during dw_up

With w_gate_shard z is the pair (g, u), h = f(g) * u, and dx sums both. Without sequence parallelism y and dx
are all-reduced and nothing is gathered.

Saved for backward: x_shard, z (or g and u) and the weights; h is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.steps import Steps, steps_on
from tpkernels.kernels.activations import (
    GATE_OF,
    Activation,
    Glu,
    act_ref,
    require_activation,
    require_glu,
)
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import any_requires_grad, autocast, casting, check_linear, features_of, tokens_of
from tpkernels.ops.main_grad import check_main_grad, weight_gradient
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.column_steps import sum_of_products
from tpkernels.ops.tensor_parallel.parallel import (
    Done,
    arrivals,
    checked_group,
    compare_in_backward,
    multiplying,
    start_rows,
    start_sum,
)
from tpkernels.ops.tensor_parallel.row_linear import RowCall, row_forward, row_linear


@dataclass(frozen=True)
class MlpCall:
    """What a call is besides its tensors."""

    group: ProcessGroup
    activation: Activation | Glu
    gated: bool
    sequence_parallel: bool
    overlap: bool
    keep: bool  # what backward needs
    main_grads: tuple[Tensor | None, ...]  # of w_up, (w_gate,) w_down

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.group.size() > 1


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
) -> Tensor:
    """act(x w_upᵀ + b_up) w_downᵀ + b_down over the ranks of a group, or the gated form with `w_gate_shard`.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    w_up_shard, w_gate_shard: (between / R, in_features)
    w_down_shard: (out_features, between / R)
    activation: gelu_tanh unless given; with w_gate_shard swiglu (the default), geglu or geglu_tanh
    main_grads: of w_up_shard, w_gate_shard (if gated) and w_down_shard: gradients are added there in place
    returns: like x, with out_features
    """
    op = "parallel_mlp"
    gated = w_gate_shard is not None
    if gated and b_up_shard is not None:
        raise ValueError(
            f"{op}: expected no b_up_shard with w_gate_shard, a gated unit has no biases; pass None"
        )
    activation = activation or ("swiglu" if gated else "gelu_tanh")
    if gated:
        require_glu(op, cast("Glu", activation))
    else:
        require_activation(op, cast("Activation", activation))
    count = 3 if gated else 2
    into = [None] * count if main_grads is None else list(main_grads)
    if len(into) != count:
        raise ValueError(f"{op}: expected {count} main_grads, one for each weight, got {len(into)}")
    if torch.compiler.is_compiling():
        if w_gate_shard is None:
            h = column_linear(
                x,
                w_up_shard,
                b_up_shard,
                group,
                activation=cast("Activation", activation),
                sequence_parallel=sequence_parallel,
                overlap=overlap,
                main_grad=into[0],
            )
        else:
            u, g = column_linear(
                x,
                [w_up_shard, w_gate_shard],
                None,
                group,
                sequence_parallel=sequence_parallel,
                overlap=overlap,
                main_grad=into[:-1],
            )
            h = act_ref(g, GATE_OF[cast("Glu", activation)]) * u
        # the two operators one after the other: the same numbers, but h is kept and dh is written
        return row_linear(
            h,
            w_down_shard,
            b_down,
            group,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            main_grad=into[-1],
        )
    group = checked_group(
        group,
        op,
        dtype=x.dtype,
        rows=x.shape[:-1],
        width=w_down_shard.shape[0],
        tensors=[x, w_up_shard, w_gate_shard, w_down_shard, b_up_shard, b_down],
        options=(activation, gated, b_down is not None, sequence_parallel, overlap),
    )
    w_up, b_up, w_down, w_gate = w_up_shard, b_up_shard, w_down_shard, w_gate_shard
    if casting(x):
        x, w_up, b_up, w_down, b_down, w_gate = cast(
            "tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]",
            autocast(x, w_up, b_up, w_down, b_down, w_gate),
        )
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
    if sequence_parallel and x.ndim < 2:
        raise ValueError(
            f"{op}: expected x (tokens, ..., in_features) with sequence_parallel, got {x.ndim}-D"
        )
    keep = any_requires_grad(x, b_up, b_down, *weights)
    call = MlpCall(group, activation, gated, sequence_parallel, overlap, keep, tuple(into))
    y: Tensor = _ParallelMlp.apply(call, tokens_of(x), b_up, b_down, *weights)  # type: ignore[no-untyped-call]
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[1])


class _ParallelMlp(torch.autograd.Function):
    @staticmethod
    @all_or_fail
    def forward(
        ctx: Any, call: MlpCall, x: Tensor, b_up: Tensor | None, b_down: Tensor | None, *weights: Tensor
    ) -> Tensor:
        steps = steps_on(x.device)
        *ups, w_down = weights
        h, kept = _up(steps, call, x, ups, b_up)
        ctx.call = call
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (b_up, b_down)]
        ctx.save_for_backward(x, *weights, *kept)
        down = RowCall(call.group, call.sequence_parallel, call.overlap)
        return row_forward("parallel_mlp", down, h, w_down, b_down)

    @staticmethod
    @first_order("parallel_mlp", reads_intermediates=True)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx, steps_on(dy.device), dy)


def _up(
    steps: Steps, call: MlpCall, x: Tensor, ups: Sequence[Tensor], b_up: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """(h, what backward needs of it: z, or g and u)"""
    gathering = start_rows("parallel_mlp", "gather of x", x, call.group) if call.gathers else Done(x)
    if multiplying(gathering, call.overlap) and not call.gated:
        activation = cast("Activation", call.activation)
        ((h, z),) = gathering.products(ups, [b_up], activation, call.keep, keep_rows=False)
        return h, [] if z is None else [z]
    tokens = x.shape[0] * (call.group.size() if call.gathers else 1)
    h, *kept = (x.new_empty(tokens, ups[0].shape[0]) for _ in range(1 + call.keep * len(ups)))
    for rows, part in arrivals(gathering, call.overlap):
        results: tuple[Tensor | None, ...]
        if call.gated:
            w_up, w_gate = ups
            results = steps.glu(part, w_gate, w_up, cast("Glu", call.activation), call.keep)
        else:
            results = steps.linear(part, ups[0], b_up, cast("Activation", call.activation), call.keep)
        for whole, result in zip((h, *kept), results, strict=False):
            assert result is not None
            whole[rows] = result
    return h, kept


@all_or_fail
def _gradients(ctx: Any, steps: Steps, dy_shard: Tensor) -> list[Tensor | None]:
    """In the order of inputs: x, b_up, b_down, w_up, (w_gate,) w_down."""
    call: MlpCall = ctx.call
    op = "parallel_mlp backward"
    count = len(call.main_grads)
    x, *saved = ctx.saved_tensors
    *ups, w_down = saved[:count]
    kept = saved[count:]
    _, needs_dx, needs_b_up, needs_b_down, *needs = ctx.needs_input_grad
    *needs_ups, needs_down = needs

    compare_in_backward(op, call.group, ctx.needs_input_grad[1:])
    gathering_dy = start_rows(op, "gather of dy", dy_shard, call.group) if call.gathers else Done(dy_shard)
    gathering_x = start_rows(op, "gather of x", x, call.group) if call.gathers and any(needs_ups) else Done(x)
    tokens = kept[0].shape[0]
    dzs = [torch.empty_like(part) for part in kept]
    h = torch.empty_like(kept[0])
    db_up = None
    for rows, dy_part in arrivals(gathering_dy, call.overlap):
        parts = [part[rows] for part in kept]
        if call.gated:
            g, u = parts
            dzs[0][rows], dzs[1][rows], h[rows] = steps.dglu(
                dy_part, w_down, g, u, cast("Glu", call.activation)
            )
        else:
            activation = cast("Activation", call.activation)
            dzs[0][rows], db_part = steps.dgrad_act(dy_part, w_down, parts[0], activation, needs_b_up)
            h[rows] = act_ref(parts[0], activation)
            if db_part is not None:
                db_up = db_part if db_up is None else db_up + db_part
    if call.gated:
        dzs.reverse()  # dg, du -> in the order of the weights: up, gate
    dy = gathering_dy.wait()
    dw_down = weight_gradient(steps, dy, h, call.main_grads[-1]) if needs_down else None
    db_down = steps.bias_grad(dy).to(ctx.bias_dtypes[1]) if needs_b_down else None
    whole_x = gathering_x.wait()
    dx = None
    if needs_dx:
        dx = start_sum(
            op,
            lambda rows: sum_of_products(steps, [dz[rows] for dz in dzs], ups),
            tokens,
            ups[0].shape[1],
            x,
            call.group,
            scatter=call.sequence_parallel,
            overlap=call.overlap,
        )
    dws = [
        weight_gradient(steps, dz, whole_x, into) if need else None
        for dz, into, need in zip(dzs, call.main_grads, needs_ups, strict=False)
    ]
    return [
        None if dx is None else dx.wait(),
        None if db_up is None else db_up.to(ctx.bias_dtypes[0]),
        db_down,
        *dws,
        dw_down,
    ]
