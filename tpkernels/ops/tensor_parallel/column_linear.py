"""Column-parallel linear: each rank computes some of the features, for all tokens.

R ranks, T tokens, K in_features, N out_features:

    x_shard   (T / R, K)   this rank's tokens under sequence parallelism, else x (T, K) on every rank
    w_shard   (N / R, K)   b_shard  (N / R,)
    y_shard   (T, N / R)   all tokens, our features

    forward   z_shard  = all_gather(x_shard) w_shardᵀ + b_shard      rows as they arrive
              y_shard  = act(z_shard)
    dz        dz_shard = dy_shard * act'(z_shard)
    dgrad     dx_shard = reduce_scatter(dz_shard w_shard)            pieces travel while others are computed
    wgrad     dw_shard = dz_shardᵀ x                                 x is gathered again during dgrad
    dbias     db_shard = dz_shard.sum(0)                             no communication

Without sequence parallelism nothing is gathered, and dx is all-reduced. Several weights share one gather, and
the sum of their dx.

Saved for backward: x_shard (with save_gathered: x), the weights, and z_shard where there is an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    any_requires_grad,
    autocast,
    casting,
    check_linear,
    compiling,
    features_of,
    tokens_of,
)
from tpkernels.ops.main_grad import check_main_grad
from tpkernels.ops.tensor_parallel.column_steps import (
    ColumnCall,
    column_forward,
    column_gradients,
    in_dtypes,
    save_for_column,
)
from tpkernels.ops.tensor_parallel.parallel import checked_group
from tpkernels.ops.tensor_parallel.registered_column import AccumulatingColumnLinear, registered_column_linear

Weights = Tensor | Sequence[Tensor]
Biases = Tensor | Sequence[Tensor | None] | None


def column_linear(
    x: Tensor,
    weight_shard: Weights,
    bias_shard: Biases,
    group: ProcessGroup,
    *,
    activation: Activation | None = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
    main_grad: Tensor | Sequence[Tensor | None] | None = None,
    save_gathered: bool = False,
) -> Any:
    """act(x weightᵀ + bias), of which this rank computes its features.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (out_features / R, in_features), or several such that share x
    bias_shard: (out_features / R,), or as many as there are weights
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    save_gathered: keep the gathered x for backward, instead of gathering it again
    returns: (tokens, ..., out_features / R); a tuple of them for several weights
    """
    op = "column_linear"
    activation = activation or "none"
    require_activation(op, activation)
    single = isinstance(weight_shard, Tensor)
    weights = [weight_shard] if isinstance(weight_shard, Tensor) else list(weight_shard)
    if not weights:
        raise ValueError(f"{op}: expected at least one weight_shard, got an empty list")
    biases = _listed(op, "bias_shard", bias_shard, len(weights))
    main_grads = _listed(op, "main_grad", main_grad, len(weights))
    group = checked_group(
        group,
        op,
        dtype=x.dtype,
        rows=x.shape[:-1],
        width=x.shape[-1] if x.ndim else 0,
        tensors=[x, *weights, *biases],
        options=(activation, sequence_parallel, overlap, save_gathered),
    )
    count = len(weights)
    if casting(x):
        x, *others = cast("list[Tensor]", list(autocast(x, *weights, *biases)))
        weights, biases = others[:count], list(others[count:])
    for weight, bias, into in zip(weights, biases, main_grads, strict=True):
        check_linear(op, x, features_of(op, x), weight, bias, ("weight_shard", "bias_shard"))
        check_main_grad(op, into, weight)
    if sequence_parallel and x.ndim < 2:
        raise ValueError(
            f"{op}: expected x (tokens, ..., in_features) with sequence_parallel, got {x.ndim}-D"
        )
    needs = any_requires_grad(x, *weights, *biases)
    call = ColumnCall(
        group,
        activation,
        sequence_parallel,
        overlap,
        keep_z=needs and activation != "none",
        keep_gathered=needs and save_gathered,
    )
    tokens = tokens_of(x)
    if compiling(op):
        if all(into is None for into in main_grads):
            given = [bias for bias in biases if bias is not None]
            has_bias = [bias is not None for bias in biases]
            ys = registered_column_linear(tokens, weights, given, has_bias, *call.as_options())[:count]
        else:
            ys = AccumulatingColumnLinear.apply(call, main_grads, tokens, *weights, *biases)  # type: ignore[no-untyped-call]
    else:
        ys = _ColumnLinear.apply(call, main_grads, tokens, *weights, *biases)  # type: ignore[no-untyped-call]
    leading = list(x.shape[:-1])
    if call.gathers:
        leading[0] *= group.size()
    ys = tuple(y if x.ndim == 2 else y.view(*leading, y.shape[1]) for y in ys)
    return ys[0] if single else ys


def _listed(op: str, name: str, values: Biases, count: int) -> list[Tensor | None]:
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
    """The eager way, straight to kernels and transfers."""

    @staticmethod
    def forward(
        ctx: Any, call: ColumnCall, main_grads: list[Tensor | None], x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(main_grads)
        weights, biases = cast("list[Tensor]", list(parameters[:count])), list(parameters[count:])
        results = column_forward(call, x, weights, biases)
        ctx.call, ctx.main_grads = call, main_grads
        save_for_column(ctx, call, x, weights, biases, results)
        return tuple(results[:count])

    @staticmethod
    @first_order("column_linear", reads_intermediates=True)
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count = len(dys)
        needs = ctx.needs_input_grad[2:]
        x, *saved = ctx.saved_tensors
        dx, dws, dbs = column_gradients(
            ctx.call, needs, list(dys), x, saved[:count], saved[count:], ctx.main_grads
        )
        return None, None, dx, *dws, *in_dtypes(ctx.bias_dtypes, dbs)
