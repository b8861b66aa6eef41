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
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tpkernels.kernels.activations import Activation, act_grad_ref, require_activation
from tpkernels.ops.inputs import any_requires_grad, autocast, check_linear, features_of, tokens_of
from tpkernels.ops.main_grad import check_main_grad, require_no_main_grad, weight_gradient
from tpkernels.ops.parallel import Done, arrivals, checked_group, group_named, start_rows, start_sum
from tpkernels.ops.registered import or_empty
from tpkernels.tuning.steps import Steps, steps_on

Weights = Tensor | Sequence[Tensor]
Biases = Tensor | Sequence[Tensor | None] | None


@dataclass(frozen=True)
class ColumnCall:
    """What a call is besides its tensors."""

    group: ProcessGroup
    activation: Activation
    sequence_parallel: bool
    overlap: bool
    keep_z: bool
    keep_gathered: bool

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.group.size() > 1

    @property
    def saves_gathered(self) -> bool:
        return self.keep_gathered and self.gathers

    def as_options(self) -> tuple[str, str, bool, bool, bool, bool]:
        """As an operator takes it."""
        name = str(self.group.group_name)
        flags = self.sequence_parallel, self.overlap, self.keep_z, self.keep_gathered
        return name, self.activation, *flags

    @staticmethod
    def of_options(group_name: str, activation: str, *flags: bool) -> ColumnCall:
        return ColumnCall(group_named(group_name), cast("Activation", activation), *flags)


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
    weights, biases, main_grads = _lists(op, weight_shard, bias_shard, main_grad)
    group = checked_group(group, op, dtype=x.dtype, rows=x.shape[:-1], width=x.shape[-1] if x.ndim else 0)
    x, *others = cast("list[Tensor]", list(autocast(x, *weights, *biases)))
    count = len(weights)
    weights, biases = others[:count], others[count:]
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
    if torch.compiler.is_compiling():
        for into in main_grads:
            require_no_main_grad(op, into)
        ys = registered_column_linear(tokens, weights, biases, *call.as_options())[:count]
    else:
        ys = _ColumnLinear.apply(call, main_grads, tokens, *weights, *biases)  # type: ignore[no-untyped-call]
    leading = list(x.shape[:-1])
    if call.gathers:
        leading[0] *= group.size()
    ys = tuple(y if x.ndim == 2 else y.view(*leading, y.shape[1]) for y in ys)
    return ys[0] if single else ys


def _lists(
    op: str, weights: Weights, biases: Biases, main_grads: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
    """One of each for every weight."""
    listed = [weights] if isinstance(weights, Tensor) else list(weights)
    if not listed:
        raise ValueError(f"{op}: expected at least one weight_shard, got an empty list")
    found = []
    for name, values in (("bias_shard", biases), ("main_grad", main_grads)):
        if values is None:
            values = [None] * len(listed)
        elif isinstance(values, Tensor):
            values = [values]
        if len(values) != len(listed):
            raise ValueError(
                f"{op}: expected as many of {name} as of weight_shard, {len(listed)}, got {len(values)}; "
                "give None for a weight without"
            )
        found.append(list(values))
    return listed, *found


class _ColumnLinear(torch.autograd.Function):
    """The eager way, straight to kernels and transfers."""

    @staticmethod
    def forward(
        ctx: Any, call: ColumnCall, main_grads: list[Tensor | None], x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(main_grads)
        weights, biases = cast("list[Tensor]", list(parameters[:count])), list(parameters[count:])
        results = _forward(call, x, weights, biases)
        ctx.call, ctx.main_grads = call, main_grads
        _save(ctx, call, x, weights, biases, results)
        return tuple(results[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        count = len(dys)
        needs = ctx.needs_input_grad[2:]
        x, *saved = ctx.saved_tensors
        dx, dws, dbs = _gradients(ctx.call, needs, list(dys), x, saved[:count], saved[count:], ctx.main_grads)
        return None, None, dx, *dws, *_in(ctx.bias_dtypes, dbs)


def _save(
    ctx: Any,
    call: ColumnCall,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    results: Sequence[Tensor],
) -> None:
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
    zs = results[len(weights) : 2 * len(weights)] if call.keep_z else ()
    ctx.save_for_backward(results[-1] if call.saves_gathered else x, *weights, *zs)


def _in(dtypes: Sequence[torch.dtype | None], dbs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Bias gradients in the dtypes of the biases."""
    return [None if db is None else db.to(dtype) for dtype, db in zip(dtypes, dbs, strict=True)]


def _forward(
    call: ColumnCall, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """y of each weight, then z of each if it is kept, then the gathered x if it is."""
    steps = steps_on(x.device)
    gathering = start_rows("column_linear", x, call.group) if call.gathers else Done(x)
    tokens = x.shape[0] * (call.group.size() if call.gathers else 1)
    ys = [x.new_empty(tokens, weight.shape[0]) for weight in weights]
    zs = [torch.empty_like(y) for y in ys] if call.keep_z else []
    for rows, part in arrivals(gathering, call.overlap):
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            y, z = steps.linear(part, weight, bias, call.activation, call.keep_z)
            if part.shape[0] == tokens:  # no need to copy
                ys[number] = y
                if z is not None:
                    zs[number] = z
            else:
                ys[number][rows] = y
                if z is not None:
                    zs[number][rows] = z
    return [*ys, *zs, gathering.wait()] if call.saves_gathered else [*ys, *zs]


def _gradients(
    call: ColumnCall,
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    main_grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """(dx, dw of each weight, db of each in fp32); needs: of x, the weights, the biases"""
    steps = steps_on(x.device)
    count = len(weights)
    needs_dx, needs_dw, needs_db = needs[0], needs[1 : 1 + count], needs[1 + count :]
    op = "column_linear backward"
    gathers = call.gathers and not call.saves_gathered and any(needs_dw)
    gathering = start_rows(op, x, call.group) if gathers else Done(x)
    dzs = [act_grad_ref(dy, z, call.activation) for dy, z in zip(dys, zs, strict=True)] if zs else dys
    summing = None
    if needs_dx:
        summing = start_sum(
            op,
            lambda rows: sum_of_products(steps, [dz[rows] for dz in dzs], weights),
            dzs[0].shape[0],
            weights[0].shape[1],
            dzs[0],
            call.group,
            scatter=call.sequence_parallel,
            overlap=call.overlap,
        )
        if not call.overlap:
            summing = Done(summing.wait())
    dbs = [steps.bias_grad(dz) if need else None for dz, need in zip(dzs, needs_db, strict=True)]
    whole = gathering.wait()
    dws = [
        weight_gradient(steps, dz, whole, into) if need else None
        for dz, into, need in zip(dzs, main_grads, needs_dw, strict=True)
    ]
    return None if summing is None else summing.wait(), dws, dbs


def sum_of_products(steps: Steps, dzs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """dz w of each weight, summed: the gradient of the x that they share."""
    total = steps.dgrad(dzs[0], weights[0])
    for dz, weight in zip(dzs[1:], weights[1:], strict=True):
        total += steps.dgrad(dz, weight)
    return total


# Under torch.compile: both directions as operators, which name their group.


@torch.library.custom_op("tpkernels::column_linear", mutates_args=())
def registered_column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group_name: str,
    activation: str,
    sequence_parallel: bool,
    overlap: bool,
    keep_z: bool,
    keep_gathered: bool,
) -> list[Tensor]:
    call = ColumnCall.of_options(group_name, activation, sequence_parallel, overlap, keep_z, keep_gathered)
    return _forward(call, x, weights, biases)


@registered_column_linear.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group_name: str,
    activation: str,
    sequence_parallel: bool,
    overlap: bool,
    keep_z: bool,
    keep_gathered: bool,
) -> list[Tensor]:
    call = ColumnCall.of_options(group_name, activation, sequence_parallel, overlap, keep_z, keep_gathered)
    tokens = x.shape[0] * (call.group.size() if call.gathers else 1)
    ys = [x.new_empty(tokens, weight.shape[0]) for weight in weights]
    zs = [torch.empty_like(y) for y in ys] if keep_z else []
    return [*ys, *zs, x.new_empty(tokens, x.shape[1])] if call.saves_gathered else [*ys, *zs]


@torch.library.custom_op("tpkernels::column_linear_backward", mutates_args=())
def registered_column_linear_backward(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    group_name: str,
    activation: str,
    sequence_parallel: bool,
    overlap: bool,
    keep_z: bool,
    keep_gathered: bool,
) -> list[Tensor]:
    call = ColumnCall.of_options(group_name, activation, sequence_parallel, overlap, keep_z, keep_gathered)
    dx, dws, dbs = _gradients(call, needs, dys, x, weights, zs, [None] * len(weights))
    return [or_empty(gradient, dys[0]) for gradient in (dx, *dws, *dbs)]


@registered_column_linear_backward.register_fake
def _(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    group_name: str,
    activation: str,
    sequence_parallel: bool,
    overlap: bool,
    keep_z: bool,
    keep_gathered: bool,
) -> list[Tensor]:
    call = ColumnCall.of_options(group_name, activation, sequence_parallel, overlap, keep_z, keep_gathered)
    tokens = dys[0].shape[0] // (call.group.size() if call.gathers else 1)
    shapes = [(tokens, x.shape[1]), *(tuple(weight.shape) for weight in weights)]
    shapes += [(weight.shape[0],) for weight in weights]
    wide = [torch.float32 if number > len(weights) else x.dtype for number in range(len(shapes))]
    return [
        x.new_empty(shape, dtype=dtype) if need else x.new_empty(0)
        for need, shape, dtype in zip(needs, shapes, wide, strict=True)
    ]


def _registered_save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, *ctx.options = inputs
    ctx.count = len(weights)
    _save(ctx, ColumnCall.of_options(*ctx.options), x, weights, biases, output)
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    ctx.needs = [needs_x, *needs_weights, *needs_biases]


def _registered_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    # nobody sees z and the gathered x, so their gradients say nothing
    count = ctx.count
    x, *saved = ctx.saved_tensors
    results = registered_column_linear_backward(
        ctx.needs, list(grads[:count]), x, saved[:count], saved[count:], *ctx.options
    )
    found = [result if need else None for result, need in zip(results, ctx.needs, strict=True)]
    dbs = _in(ctx.bias_dtypes, found[1 + count :])
    return found[0], found[1 : 1 + count], dbs, *(None for _ in ctx.options)


registered_column_linear.register_autograd(_registered_backward, setup_context=_registered_save)
