"""Norms whose tokens may be on several ranks, and whose parameters get whole gradients.

R ranks, T tokens, K features:

    x_shard  (T / R, K)   this rank's tokens; or x (T, K) on every rank, without a group
    dweight  = Σ over tokens of dy * n, dbias = Σ over tokens of dy      (K,)    the same on every rank

The sums of all ranks are gathered, and added in the order of ranks. With TP-invariance tokens are cut into
segments, whose sums are added in a tree, with a group or without: see `tp_invariance`. They are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Operator
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, apply, as_dtype
from tpkernels.ops.tensor_parallel.operands import Group
from tpkernels.ops.tensor_parallel.parallel import checked_group, gather_numbers
from tpkernels.ops.tensor_parallel.segments import canonical, segments_of
from tpkernels.tp_invariance import mode, tree_sum

Kind = Literal["rms_norm", "layer_norm"]


def token_norm(
    kind: Kind,
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    group: ProcessGroup | None,
) -> Tensor:
    """x: (tokens, ..., features); rows: the same as a matrix; the result is like this"""
    if group is not None:
        moved = x.shape[:-1]
        group = checked_group(group, kind, dtype=x.dtype, rows=moved, width=x.shape[-1], tensors=[weight])
    parts = _parts(kind, x, group)
    y: Tensor = apply(_TokenNorm, kind, rows, weight, bias, eps, parts, group)
    return y


def _parts(kind: Kind, x: Tensor, group: ProcessGroup | None) -> int:
    """Into how many parts the tokens are cut. Without a group any number of tokens will do."""
    if not mode.segments:
        return 1
    parts = mode.fix(kind) if group is None else segments_of(kind, group)
    tokens = x.shape[0] if x.ndim > 1 else 1
    if tokens % parts == 0:
        return parts
    if group is not None:
        raise ValueError(
            f"{kind}: expected tokens (dimension 0) that this rank's {parts} of the {mode.segments} segments "
            f"of TP-invariance divide, got {tuple(x.shape)}; pad the sequence"
        )
    return 1


class _TokenNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        kind: Kind,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        parts: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        if kind == "rms_norm":
            y, *statistics = primitives.rms_norm(x, weight, eps)
        else:
            y, *statistics = primitives.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.options = kind, parts, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order("a norm with TP-invariance, or over a group", reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *statistics = ctx.saved_tensors
        kind, parts, group = ctx.options
        _, needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        dx, sums = _gradients(dy, x, weight, statistics, parts)
        if group is not None and group.size() > 1 and (needs_dweight or needs_dbias):
            sums = _sum_of_ranks(sums, kind, group)
        return (
            None,
            dx if needs_dx else None,
            as_dtype(sums[0], weight.dtype) if needs_dweight else None,
            as_dtype(sums[1], ctx.bias_dtype) if needs_dbias else None,
            None,
            None,
            None,
        )


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Sequence[Tensor], parts: int
) -> tuple[Tensor, Tensor]:
    """dx, and the sums over this rank's tokens: (1 or 2, features), for dweight and dbias."""
    norm_grad: Callable[..., tuple[Tensor, ...]] = (
        primitives.rms_norm_grad if len(statistics) == 1 else primitives.layer_norm_grad
    )
    size = x.shape[0] // parts
    dxs, sums = [], []
    for part in range(parts):
        tensors = [canonical(t[part * size : (part + 1) * size]) for t in (dy, x, *statistics)]
        dx, *of_parameters = norm_grad(*tensors[:2], weight, *tensors[2:])
        dxs.append(dx)
        sums.append(torch.stack(of_parameters))
    return dxs[0] if len(dxs) == 1 else torch.cat(dxs), tree_sum(sums)


@all_or_fail
def _sum(sums: Tensor, op: str, group: Group) -> Tensor:
    everybody = gather_numbers(op, "gather of sums over tokens", sums, group)
    return tree_sum(everybody.unbind()) if mode.segments else reduce(add, everybody.unbind())


def _sum_shape(sums: Tensor, op: str, group: ProcessGroup) -> Tensor:
    return torch.empty_like(sums)


_sum_of_ranks = Operator("norm_parameter_gradients", _sum, _sum_shape)
