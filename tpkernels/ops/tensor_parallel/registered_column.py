"""Column-parallel linear under torch.compile: both directions as operators, which name their group.

A list that an operator takes holds no None: biases come without, and `has_bias` says whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels.ops.main_grad import sum_for
from tpkernels.ops.registered import dtype_of_sums, or_empty
from tpkernels.ops.tensor_parallel.column_steps import (
    ColumnCall,
    column_forward,
    column_gradients,
    in_dtypes,
    save_for_column,
)


@torch.library.custom_op("tpkernels::column_linear", mutates_args=())
def registered_column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    group_name: str,
    activation: str,
    sequence_parallel: bool,
    overlap: bool,
    keep_z: bool,
    keep_gathered: bool,
) -> list[Tensor]:
    call = ColumnCall.of_options(group_name, activation, sequence_parallel, overlap, keep_z, keep_gathered)
    return column_forward(call, x, weights, _spread(biases, has_bias))


@registered_column_linear.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    *options: Any,
) -> list[Tensor]:
    call = ColumnCall.of_options(*options)
    tokens = x.shape[0] * (call.group.size() if call.gathers else 1)
    ys = [x.new_empty(tokens, weight.shape[0]) for weight in weights]
    zs = [torch.empty_like(y) for y in ys] if call.keep_z else []
    return [*ys, *zs, x.new_empty(tokens, x.shape[1])] if call.saves_gathered else [*ys, *zs]


@torch.library.custom_op("tpkernels::column_linear_backward", mutates_args=())
def registered_column_linear_backward(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    wide: Sequence[bool],
    group_name: str,
    activation: str,
    sequence_parallel: bool,
    overlap: bool,
    keep_z: bool,
    keep_gathered: bool,
) -> list[Tensor]:
    """wide: which dw come as they were summed, in fp32 or wider"""
    call = ColumnCall.of_options(group_name, activation, sequence_parallel, overlap, keep_z, keep_gathered)
    sums = [
        sum_for(dy, x, wide=is_wide and need) for dy, is_wide, need in zip(dys, wide, needs[1:], strict=False)
    ]
    dx, dws, dbs = column_gradients(call, needs, dys, x, weights, zs, sums)
    dws = [dw if total is None else total for dw, total in zip(dws, sums, strict=True)]
    return [or_empty(gradient, dys[0]) for gradient in (dx, *dws, *dbs)]


@registered_column_linear_backward.register_fake
def _(
    needs: Sequence[bool],
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    zs: Sequence[Tensor],
    wide: Sequence[bool],
    *options: Any,
) -> list[Tensor]:
    call = ColumnCall.of_options(*options)
    tokens = dys[0].shape[0] // (call.group.size() if call.gathers else 1)
    shapes = [(tokens, x.shape[1]), *(tuple(weight.shape) for weight in weights)]
    shapes += [(weight.shape[0],) for weight in weights]
    summed = [False, *wide, *(True for _ in weights)]
    return [
        x.new_empty(shape, dtype=dtype_of_sums(x) if is_sum else x.dtype) if need else x.new_empty(0)
        for need, shape, is_sum in zip(needs, shapes, summed, strict=True)
    ]


def _spread(biases: Sequence[Tensor], has_bias: Sequence[bool]) -> list[Tensor | None]:
    """One for each weight again."""
    given = iter(biases)
    return [next(given) if has else None for has in has_bias]


def _registered_save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, given, ctx.has_bias, *ctx.options = inputs
    biases = _spread(given, ctx.has_bias)
    save_for_column(ctx, ColumnCall.of_options(*ctx.options), x, weights, biases, output)
    ctx.needs = [tensor is not None and tensor.requires_grad for tensor in (x, *weights, *biases)]
    ctx.wide = [False for _ in weights]


def _gradients(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, list[Any], list[Tensor | None]]:
    """(dx, dw of each weight, db of each)"""
    # nobody sees z and the gathered x, so their gradients say nothing
    count = len(ctx.wide)
    x, *saved = ctx.saved_tensors
    results = registered_column_linear_backward(
        ctx.needs, list(grads[:count]), x, saved[:count], saved[count:], ctx.wide, *ctx.options
    )
    found = [result if need else None for result, need in zip(results, ctx.needs, strict=True)]
    return found[0], found[1 : 1 + count], in_dtypes(ctx.bias_dtypes, found[1 + count :])


def _registered_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    dx, dws, dbs = _gradients(ctx, grads)
    given = [db for db, has in zip(dbs, ctx.has_bias, strict=True) if has]
    return dx, dws, given, None, *(None for _ in ctx.options)


registered_column_linear.register_autograd(_registered_backward, setup_context=_registered_save)


class AccumulatingColumnLinear(torch.autograd.Function):
    """Where there are main_grads, as `with_main_grad` has it: autograd follows no tensors in lists."""

    @staticmethod
    def forward(
        ctx: Any, call: ColumnCall, main_grads: Sequence[Tensor | None], x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(main_grads)
        weights, biases = cast("list[Tensor]", list(parameters[:count])), parameters[count:]
        given = [bias for bias in biases if bias is not None]
        has_bias = [bias is not None for bias in biases]
        results = registered_column_linear(x, weights, given, has_bias, *call.as_options())
        save_for_column(ctx, call, x, weights, biases, results)
        ctx.options, ctx.needs, ctx.main_grads = call.as_options(), list(ctx.needs_input_grad[2:]), main_grads
        ctx.wide = [main_grad is not None for main_grad in main_grads]
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        dx, dws, dbs = _gradients(ctx, dys)
        for number, main_grad in enumerate(ctx.main_grads):
            if main_grad is not None and dws[number] is not None:
                main_grad.add_(dws[number])
                dws[number] = None
        return None, None, dx, *dws, *dbs
