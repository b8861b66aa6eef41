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
again. How products, and what lies between them, are computed: `ops.matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.kernels.activations import Activation, Glu, require_activation, require_glu
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
    like_tokens,
    tokens_of,
)
from tpkernels.ops.local.norm import Norm
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
    split_of,
    strategy_of,
)
from tpkernels.ops.tensor_parallel.residual_norm import (
    NO_GRADIENTS,
    NOTHING,
    SCHEMA,
    Added,
    Saved,
    added,
    gradients,
    reduced,
)


@overload
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
    tp_invariant: int | None = None,
    residual: None = None,
    norm: None = None,
) -> Tensor: ...


@overload
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
    tp_invariant: int | None = None,
    residual: Tensor,
    norm: Norm,
) -> tuple[Tensor, Tensor]: ...


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
    tp_invariant: int | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute act(x w_upᵀ + b_up) w_downᵀ + b_down over a group, or the gated form with `w_gate_shard`.

    x: (tokens, ..., in_features), or this rank's tokens of dimension 0 if sequence_parallel
    w_up_shard, w_gate_shard: (between / R, in_features)
    w_down_shard: (out_features, between / R)
    activation: gelu_tanh unless given; with w_gate_shard swiglu (the default), geglu or geglu_tanh
    main_grads: of w_up_shard, w_gate_shard (if gated) and w_down_shard: gradients are added there in place
    quantize: compute it in fp8, and gather fp8
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    residual, norm: like the output; and a norm of it plus the output, see `residual_norm`
    returns: like x, with out_features; with residual and norm the residual plus that, and its norm
    """
    op = "parallel_mlp"
    tp = split_of(op, group, sequence_parallel, overlap, tp_invariant)
    with tp.call:
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
        if parallel.debug:
            alike = activation, w_gate is not None, b_down is not None, quantize, norm and norm.options
            tensors = [w_up, w_gate, w_down, b_up, b_down]
            compare_request(op, tp, x, tensors, alike, width=w_down.shape[0])
        if tp.sequence_parallel and x.ndim < 2:
            refuse_tokens(op, x)
        if any_autocast() and is_casting(x):
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
        matmul = strategy_of(op, tp, quantize, x)
        require_segments(op, tp, "rows of w_up_shard", w_up.shape[0])
        given, after = NOTHING, None
        if residual is not None or norm is not None:
            given, after = added(op, residual, norm, x, (*x.shape[:-1], w_down.shape[0]), tp)
        options = op, tp, matmul, activation, after
        y, *normed = up_and_down(options, tokens_of(x), ups, b_up, w_down, b_down, into, given)
    if normed:
        return like_tokens(y, x), like_tokens(normed[0], x)
    return like_tokens(y, x)


Options = tuple[str, TensorParallel, Plain, Activation | Glu, Saved | None]


def up_and_down(
    options: Options,
    x: Tensor,
    ups: Sequence[Tensor],
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    main_grads: Sequence[Tensor | None],
    given: Added = NOTHING,
) -> Sequence[Tensor]:
    """Compute the MLP of x, (tokens, features), checked and cast: [y], or [h, normed] with a residual.

    ups: the weight up, then that of a gate
    """
    (_, tp, matmul, unit, after), weights = options, [*ups, w_down]
    if not recorded((x, b_up, b_down, *weights, *given[:3])):
        operands = matmul.pack(x), b_up, b_down, weights, unit, False, x.dtype
        results = mlp_forward(*operands, *given, tp=tp, matmul=matmul)
        return results[: 1 if after is None else 2]  # type: ignore[no-any-return]
    tensors, of_norm = given[:3], given[3:]
    results = apply(_ParallelMlp, options, of_norm, main_grads, x, b_up, b_down, *tensors, *weights)
    return results if isinstance(results, tuple) else (results,)


class _ParallelMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: Options,
        of_norm: tuple[str, float],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        (op, tp, matmul, unit, after), (*ups, w_down) = options, weights
        needs_dx, needs_dws = ctx.needs_input_grad[3], any(ctx.needs_input_grad[9:-1])  # dws of the ups
        rows, given = matmul.pack(x), (residual, norm_weight, norm_bias, *of_norm)
        operands = rows, b_up, b_down, weights, unit, True, x.dtype
        results = mlp_forward(*operands, *given, tp=tp, matmul=matmul)
        (y, *normed), zs = results[: -len(ups)], results[-len(ups) :]
        kept = rows if tp.token_shards > 1 else x  # of an x that is gathered, what is sent of it
        saved_ups = ups if needs_dx else [None] * len(ups)
        saved_of_norm = [] if after is None else [y, norm_weight, *normed[1:]]
        ctx.save_for_backward(kept if needs_dws else None, *saved_ups, w_down, *zs, *saved_of_norm)
        ctx.main_grads, ctx.op = main_grads, f"{op} in fp8" if matmul.recipe else op
        ctx.options = tp, matmul, x.shape[1], unit, after
        return y if after is None else (y, normed[0])

    @staticmethod
    def spmd_typecheck(
        *,
        options: Options,
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weights: Sequence[Tensor],
    ) -> spmd_rules.Typed:
        tp, (*ups, w_down) = options[1], weights
        up, *gates = spmd_rules.column(x, ups, [b_up, *[None] * (len(ups) - 1)], tp)
        h = spmd_rules.einsum("tn,tn->tn", up, *gates) if gates else up
        y = spmd_rules.row(h, w_down, b_down, tp)
        return spmd_rules.normed(y, residual, norm_weight, norm_bias, tp)

    @staticmethod
    @first_order(reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor, *dnormed: Tensor) -> tuple[Tensor | None, ...]:
        count, main_grads = len(ctx.main_grads), ctx.main_grads
        (x, *saved), (tp, matmul, features, unit, after) = ctx.saved_tensors, ctx.options
        (*ups, w_down), zs, of_norm = saved[:count], saved[count : 2 * count - 1], saved[2 * count - 1 :]
        needs, of_added = ctx.needs_input_grad, NO_GRADIENTS
        of_weights = asked_for(ctx, main_grads, needs[-count:], -count)
        asked = *needs[3:6], *of_weights
        with tp.call:
            if after is not None:
                dy, of_added = gradients(after, of_norm, (dy, *dnormed), needs[6:9], tp)
            operands = dy, x, ups, w_down, zs
            dx, db_up, db_down, *dws = mlp_gradients(
                *operands, asked, flags_if_traced(main_grads), features, unit,
                tp=tp, matmul=matmul, given=asked,
            )  # fmt: skip
        return None, None, None, dx, db_up, db_down, *of_added, *add_if_traced(main_grads, dws)


def _forward(
    rows: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    weights: Sequence[Tensor],
    unit: Activation | Glu,
    keep: bool,
    dtype: torch.dtype,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    tp: TensorParallel,
    matmul: Plain,
) -> list[Tensor]:
    """Compute y, or what follows it; if keep, return z, or u and g, too.

    rows: of x, packed; weights: up, (gate,) down
    """
    op, (*ups, w_down) = "parallel_mlp", weights
    compute = partial(matmul.unit, ups=ups, b_up=b_up, unit=unit, keep=keep, dtype=dtype)
    work = "linear" if len(ups) == 1 else "glu", ups, compute
    gathering = tp.gather(op, "x", rows, ups[0].shape[0], matmul.how_x, work, keeps=False)
    h, zs = compute(gathering)
    terms = matmul.terms([(h, w_down)], True, dtype)
    if b_down is not None and tp.ranks > 1 and b_down.dtype != terms.like.dtype:
        b_down = b_down.to(terms.like.dtype)
    if residual is None:
        return [tp.reduce(op, terms, b_down).wait(), *zs]
    given = Added(residual, norm_weight, norm_bias, norm, eps)
    return [*reduced(op, terms, b_down, given, tp, matmul), *zs]


mlp_forward = SplitOperator(
    "parallel_mlp",
    "Tensor rows, Tensor? b_up, Tensor? b_down, Tensor[] weights, str unit, bool keep, ScalarType dtype, "
    + SCHEMA,
    _forward,
)


def _gradients(
    dy: Tensor,
    x: Tensor | None,
    ups: Sequence[Tensor | None],
    w_down: Tensor,
    zs: Sequence[Tensor],
    needs: Sequence[bool],
    main_grads: Sequence[Into],
    features: int,
    unit: Activation | Glu,
    tp: TensorParallel,
    matmul: Plain,
) -> list[Tensor | None]:
    """Compute dx, db_up, db_down, dw of each weight. needs: of these; other arguments: see `column_linear`"""
    op, dtype, splits = "parallel_mlp backward", dy.dtype, tp.token_shards > 1
    *into_ups, into_down = main_grads
    needs_dx, needs_db_up, needs_db_down, *needs_ups, needs_down = needs
    compare_in_backward(op, tp, needs)
    if not any(needs_ups):
        x = None
    rows = matmul.pack(dy, "dy")
    needs_dz = needs_dx or needs_db_up or any(needs_ups)
    asked = needs_down, needs_dz, needs_db_up
    compute = partial(matmul.unit_gradients, w_down=w_down, zs=zs, unit=unit, needs=asked, dtype=dtype)
    work = "dgrad" if len(zs) == 1 else "dglu", [w_down], compute
    gathering_dy = tp.gather(op, "dy", rows, w_down.shape[1], matmul.how_dy, work)
    gathering_x = None
    if x is not None and splits:
        # two calls of one exchange at once would cost barriers of all ranks
        alike = x.shape == rows.shape and x.dtype == rows.dtype
        gathering_x = tp.gather(op, "x", x, how=matmul.how_x, purpose="gathers of x" if alike else "gathers")
    h, dzs, db_up = compute(gathering_dy)
    full = gathering_dy.all()  # also if nobody asks for dy: the call ends for all ranks alike
    dx = dw_down = db_down = summing = None
    if needs_down or needs_db_down:
        full_dy = matmul.unpack(full, dy.shape[1], dtype, "dy") if splits else dy
        if h is not None and needs_down:
            dw_down = matmul.wgrad(full_dy, h, into_down, split="x")
        db_down = matmul.bias_grad(full_dy, split=False) if needs_db_down else None
    if gathering_x is not None:
        x = matmul.unpack(gathering_x.all(), features, dtype)
    if needs_dx:
        pairs = [(matmul.pack(dz, "dy"), up) for dz, up in zip(dzs, ups, strict=True) if up is not None]
        terms = matmul.terms(pairs, False, dtype)
        if x is not None:  # its products hide the transfers
            terms.width = 0
        summing = tp.reduce(op, terms)
    dws: list[Tensor | None] = [None] * len(ups)
    if x is not None:
        dws = [
            matmul.wgrad(dz, x, into, split="dy") if need else None
            for dz, into, need in zip(dzs, into_ups, needs_ups, strict=True)
        ]
    if summing is not None:
        dx = summing.wait()
    return [dx, db_up, db_down, *dws, dw_down]


mlp_gradients = SplitOperator(
    "parallel_mlp_backward",
    "Tensor dy, Tensor? x, Tensor?[] ups, Tensor w_down, Tensor[] zs, bool[] needs, bool[] main_grads, "
    "SymInt features, str unit",
    _gradients,
)
