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

Saved for backward: x_shard and the weights, if a gradient needs them; z_shard where there is an activation.
With save_gathered x instead of x_shard; of a shard that fits into one message both, since gathering it again
costs more time than keeping it does memory. How products are computed: `ops.matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.kernels.activations import Activation, require_activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import (
    Context,
    any_autocast,
    apply,
    autocast,
    check_linear,
    features_of,
    is_casting,
    tokens_of,
)
from tpkernels.ops.main_grad import (
    Into,
    add_if_traced,
    asked_for,
    check_main_grad,
    flags_if_traced,
)
from tpkernels.ops.matmul import Plain
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel import (
    SplitOperator,
    compare_in_backward,
    compare_request,
    recorded,
    refuse_tokens,
    require_segments,
    shaped_like,
    split_of,
    strategy_of,
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
    tp_invariant: int | None = None,
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
    tp_invariant: int | None = None,
) -> tuple[Tensor, ...]: ...


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
    tp_invariant: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute act(x weightᵀ + bias); each rank computes its own features.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (out_features / R, in_features), or several such that share x
    bias_shard: (out_features / R,), or as many as there are weights
    main_grad: the weight's gradient is added to it in place, and its `grad` stays as it is
    save_gathered: keep the gathered x for backward, instead of gathering it again
    quantize: compute it in fp8, and gather fp8
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    returns: (tokens, ..., out_features / R); a tuple of them for several weights
    """
    op = "column_linear"
    tp = split_of(op, group, sequence_parallel, overlap, tp_invariant)
    with tp.call:
        activation = activation or "none"
        if activation != "none":
            require_activation(op, activation)
        one = isinstance(weight_shard, Tensor)
        weights: list[Tensor] = [weight_shard] if one else list(weight_shard)  # type: ignore[list-item]
        if not weights:
            raise ValueError(f"{op}: expected at least one weight_shard, got an empty list")
        biases: list[Tensor | None] = [bias_shard] if one else [None] * len(weights)  # type: ignore[list-item]
        main_grads: list[Tensor | None] = [main_grad] if one else [None] * len(weights)  # type: ignore[list-item]
        if not one or isinstance(bias_shard, list | tuple) or isinstance(main_grad, list | tuple):
            if bias_shard is not None:
                biases = _listed(op, "bias_shard", bias_shard, len(weights))
            if main_grad is not None:
                main_grads = _listed(op, "main_grad", main_grad, len(weights))
        if parallel.debug:
            compare_request(op, tp, x, [*weights, *biases], (activation, save_gathered, quantize))
        if tp.sequence_parallel and x.ndim < 2:
            refuse_tokens(op, x)
        if any_autocast() and is_casting(x):
            x, *others = autocast(x, *weights, *biases)
            weights, biases = others[: len(weights)], others[len(weights) :]
        features = x.shape[-1] if x.ndim else features_of(op, x)
        for weight, bias, into in zip(weights, biases, main_grads, strict=True):
            check_linear(op, x, features, weight, bias, ("weight_shard", "bias_shard"))
            if into is not None:
                check_main_grad(op, into, weight)
        matmul = strategy_of(op, tp, quantize, x)
        if matmul.segments:
            for weight in weights:
                require_segments(op, tp, "rows of weight_shard", weight.shape[0])
        if x.ndim == 2:
            ys = column(op, x, weights, biases, main_grads, tp, matmul, activation, save_gathered)
        else:
            ys = column(op, tokens_of(x), weights, biases, main_grads, tp, matmul, activation, save_gathered)
            ys = [shaped_like(y, x, x.shape[0] * tp.token_shards) for y in ys]
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
    tp: TensorParallel,
    matmul: Plain,
    activation: Activation,
    save_gathered: bool = False,
) -> Sequence[Tensor]:
    """Compute y of each weight, (tokens, features). x: (tokens, features), checked and cast"""
    if not recorded((x, *weights, *biases)):
        rows = matmul.pack(x)
        ys: Sequence[Tensor] = column_forward(
            rows, weights, biases, activation, False, False, x.dtype, tp=tp, matmul=matmul
        )
    else:
        options, tensors = (op, tp, matmul, activation, save_gathered), [x, *weights, *biases]
        ys = apply(_ColumnLinear, options, main_grads, *tensors)
    return ys


Options = tuple[str, TensorParallel, Plain, Activation, bool]


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, options: Options, main_grads: Sequence[Tensor | None], x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        count, (op, tp, matmul, activation, save_gathered) = len(main_grads), options
        weights, biases = parameters[:count], parameters[count:]  # some biases may be None
        needs = ctx.needs_input_grad
        needs_dx, needs_dws = needs[2], any(needs[3 : 3 + count])
        splits = tp.token_shards > 1
        rows, keep_z = matmul.pack(x), activation != "none"
        is_small = splits and tp.fits_in_message(rows)
        keep_all = splits and needs_dws and (save_gathered or is_small)
        results = column_forward(
            rows, weights, biases, activation, keep_z, keep_all, x.dtype, tp=tp, matmul=matmul
        )
        # of an x that is gathered, what is sent of it: forward has it already
        kept = results.pop() if keep_all else rows if splits else x
        ctx.reads_intermediates = keep_z or (keep_all and save_gathered) or (splits and not matmul.is_plain)
        saved_weights = weights if needs_dx else [None] * count
        # with the gathered x its shard, through which a second derivative is refused
        keeps_shard = keep_all and not ctx.reads_intermediates
        saved_x = kept if needs_dws else None, x if keeps_shard else None
        ctx.save_for_backward(*saved_x, *saved_weights, *results[count:])
        ctx.main_grads, ctx.op = main_grads, f"{op} in fp8" if matmul.recipe else op
        ctx.options = tp, matmul, activation, x.shape[1], keep_all
        return tuple(results[:count])

    @staticmethod
    def spmd_typecheck(
        *, options: Options, x: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[spmd_rules.Typed, ...]:
        count = len(parameters) // 2
        return tuple(spmd_rules.column(x, parameters[:count], parameters[count:], options[1]))

    @staticmethod
    @first_order(reads_intermediates=None)
    def backward(ctx: Context, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(dys), ctx.main_grads
        tp, matmul, activation, features, keep_all = ctx.options
        x, _, *saved = ctx.saved_tensors
        weights, zs = saved[:count], saved[count:]
        needs_dx, *needs = ctx.needs_input_grad[2:]
        needs = [needs_dx, *asked_for(ctx, main_grads, needs[:count], 1), *needs[count:]]
        into = flags_if_traced(main_grads)
        arguments = dys, x, weights, zs, needs, into, features, activation, keep_all
        with tp.call:
            dx, *grads = column_gradients(*arguments, tp=tp, matmul=matmul, given=needs)
        return None, None, dx, *add_if_traced(main_grads, grads[:count]), *grads[count:]


def _forward(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: Activation,
    keep_z: bool,
    keep_all: bool,
    dtype: torch.dtype,
    tp: TensorParallel,
    matmul: Plain,
) -> list[Tensor]:
    """Compute y of each weight; return z of each, if it is kept, and the gathered rows, if these are.

    rows: packed; dtype: of the results
    """
    width = weights[0].shape[0]
    for weight in weights:
        width = min(width, weight.shape[0])
    multiply = partial(
        matmul.product, weights=weights, biases=biases, activation=activation, keep_z=keep_z, dtype=dtype
    )
    work = "linear", weights, multiply
    gathering = tp.gather("column_linear", "x", rows, width, matmul.how_x, work, keeps=keep_all)
    results = multiply(gathering)
    return [*results, gathering.all()] if keep_all else results


column_forward = SplitOperator(
    "column_linear",
    "Tensor rows, Tensor[] weights, Tensor?[] biases, str activation, bool keep_z, bool keep_all, "
    "ScalarType dtype",
    _forward,
)


def _gradients(
    dys: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor | None],
    zs: Sequence[Tensor],
    needs: Sequence[bool],
    main_grads: Sequence[Into],
    features: int,
    activation: Activation,
    keep_all: bool,
    tp: TensorParallel,
    matmul: Plain,
) -> list[Tensor | None]:
    """Compute dx, dw of each weight, db of each. needs: of x, the weights, the biases

    x: or what forward kept of it; None if no dw is needed, as weights are if dx is not
    features: of x
    """
    op, count, dtype = "column_linear backward", len(weights), dys[0].dtype
    compare_in_backward(op, tp, needs)
    gathering = summing = dx = None
    grads: list[Tensor | None] = [None] * (2 * count)
    if not any(needs[1 : 1 + count]):
        x = None
    if x is not None and not keep_all and tp.token_shards > 1:
        gathering = tp.gather(op, "x", x, how=matmul.how_x)
    dzs = [matmul.act_grad(dy, z, activation) for dy, z in zip(dys, zs, strict=True)] if zs else dys
    if needs[0]:
        pairs = [(matmul.pack(dz, "dy"), w) for dz, w in zip(dzs, weights, strict=True) if w is not None]
        terms = matmul.terms(pairs, False, dtype)
        if x is not None:  # its products hide the transfers
            terms.width = 0
        summing = tp.reduce(op, terms)
        if not tp.overlap:
            dx, summing = summing.wait(), None
    for i, dz in enumerate(dzs):
        if needs[1 + count + i]:
            grads[count + i] = matmul.bias_grad(dz, split=True)
    if x is not None:
        if gathering is not None:
            x = gathering.all()
        if tp.token_shards > 1:
            x = matmul.unpack(x, features, dtype)
        for i, (dz, into) in enumerate(zip(dzs, main_grads, strict=True)):
            if needs[1 + i]:
                grads[i] = matmul.wgrad(dz, x, into, split="dy")
    if summing is not None:
        dx = summing.wait()
    return [dx, *grads]


column_gradients = SplitOperator(
    "column_linear_backward",
    "Tensor[] dys, Tensor? x, Tensor?[] weights, Tensor[] zs, bool[] needs, bool[] main_grads, "
    "SymInt features, str activation, bool keep_all",
    _gradients,
)
