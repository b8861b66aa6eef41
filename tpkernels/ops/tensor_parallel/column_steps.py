"""What column-parallel linear computes and moves, forward and backward; `column_linear` has the equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.steps import Steps, steps_on
from tpkernels.kernels.activations import Activation, act_grad_ref
from tpkernels.ops.main_grad import weight_gradient
from tpkernels.ops.tensor_parallel.parallel import (
    Done,
    arrivals,
    compare_in_backward,
    group_named,
    multiplying,
    name_of,
    start_rows,
    start_sum,
)


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
        flags = self.sequence_parallel, self.overlap, self.keep_z, self.keep_gathered
        return name_of(self.group), self.activation, *flags

    @staticmethod
    def of_options(
        group_name: str,
        activation: str,
        sequence_parallel: bool,
        overlap: bool,
        keep_z: bool,
        keep_gathered: bool,
    ) -> ColumnCall:
        keep_z = keep_z and activation != "none"  # z would be y, and an operator may not return that twice
        return ColumnCall(
            group_named(group_name),
            cast("Activation", activation),
            sequence_parallel,
            overlap,
            keep_z,
            keep_gathered,
        )


def save_for_column(
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


def in_dtypes(dtypes: Sequence[torch.dtype | None], dbs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Bias gradients in the dtypes of the biases."""
    return [None if db is None else db.to(dtype) for dtype, db in zip(dtypes, dbs, strict=True)]


@all_or_fail
def column_forward(
    call: ColumnCall, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """y of each weight, then z of each if it is kept, then the gathered x if it is."""
    steps = steps_on(x.device)
    gathering = start_rows("column_linear", "gather of x", x, call.group) if call.gathers else Done(x)
    if multiplying(gathering, call.overlap):
        products = gathering.products(
            weights, biases, call.activation, call.keep_z, keep_rows=call.saves_gathered
        )
        results = [y for y, _ in products] + [z for _, z in products if z is not None]
        return [*results, gathering.wait()] if call.saves_gathered else results
    tokens = x.shape[0] * (call.group.size() if call.gathers else 1)
    ys = [x.new_empty(tokens, weight.shape[0]) for weight in weights]
    zs = [torch.empty_like(y) for y in ys] if call.keep_z else []
    for rows, part in arrivals(gathering, call.overlap):
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            if call.activation == "none" and part.shape[0] < tokens:
                steps.linear_into(ys[number][rows], part, weight, bias)
                continue
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


@all_or_fail
def column_gradients(
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
    compare_in_backward(op, call.group, needs)
    gathers = call.gathers and not call.saves_gathered and any(needs_dw)
    gathering = start_rows(op, "gather of x", x, call.group) if gathers else Done(x)
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
