"""Megatron's seven regions of tensor parallelism, as differentiable operators on activations.

    region                                    forward                         backward
    copy_to_region                            as it is                        all-reduce
    reduce_from_region                        all-reduce                      as it is
    scatter_to_region                         our shard of the features       all-gather features
    gather_from_region                        all-gather features             our shard of the features
    scatter_to_sequence_region                our shard of the tokens         all-gather tokens
    gather_from_sequence_region               all-gather tokens               reduce-scatter tokens
    reduce_scatter_to_sequence_region         reduce-scatter tokens           all-gather tokens

Features are the last dimension, tokens the first; a size that the ranks do not divide is refused. Inputs are
never changed, and a rank alone gets its input back. Sums are taken in fp32 in the order of ranks.

Under torch.compile what moves is an operator, which names its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.comm.transports import select
from tpkernels.comm.transports.backend_sums import (
    NOTE,
    BackendSumming,
    backend_sums,
    require_backend_sums,
)
from tpkernels.comm.transports.c10d import c10d_for
from tpkernels.comm.transports.rows import Gathering, Reducing, all_reducing
from tpkernels.dispatch.operators import Operator
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import Context, apply
from tpkernels.ops.tensor_parallel.flag_waits import waits_for
from tpkernels.ops.tensor_parallel.parallel import Group, begin_call, checked_group
from tpkernels.tp_invariance import mode

Move = Literal["keep", "sum", "our_features", "all_features", "our_tokens", "all_tokens", "sum_of_tokens"]


@from_entry
def copy_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x; all-reduce its gradient."""
    return _region("copy_to_region", x, group, "keep", "sum")


@from_entry
def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce x."""
    return _region("reduce_from_region", x, group, "sum", "keep")


@from_entry
def scatter_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's shard of the features of x, which is the same on all ranks."""
    return _region("scatter_to_region", x, group, "our_features", "all_features")


@from_entry
def gather_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather features; each rank has a shard."""
    return _region("gather_from_region", x, group, "all_features", "our_features")


@from_entry
def scatter_to_sequence_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's shard of the tokens of x, which is the same on all ranks."""
    return _region("scatter_to_sequence_region", x, group, "our_tokens", "all_tokens")


@from_entry
def gather_from_sequence_region(
    x: Tensor, group: ProcessGroup, *, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """All-gather tokens; each rank has a shard.

    tensor_parallel_output_grad: the next op is split over ranks, so that gradients are partial, and are
        reduce-scattered; False: all ranks have the full gradient, and each takes its tokens
    """
    backward: Move = "sum_of_tokens" if tensor_parallel_output_grad else "our_tokens"
    return _region("gather_from_sequence_region", x, group, "all_tokens", backward)


@from_entry
def reduce_scatter_to_sequence_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Reduce-scatter x over tokens."""
    return _region("reduce_scatter_to_sequence_region", x, group, "sum_of_tokens", "all_tokens")


def _region(op: str, x: Tensor, group: ProcessGroup, forward: Move, backward: Move) -> Tensor:
    if x.ndim < 1:
        raise ValueError(f"{op}: expected at least one dimension, got a tensor without")
    group = checked_group(group, op, x, options=(forward, backward))
    recorded = torch.is_grad_enabled() and x.requires_grad
    if mode.segments and (forward.startswith("sum") or (recorded and backward.startswith("sum"))):
        raise ValueError(
            f"{op}: expected no sum of what ranks computed by themselves with TP-invariance, for nobody "
            "knows how that depends on their number; use the parallel layers, or turn TP-invariance off"
        )
    if group.size() == 1:
        return x
    moved: Tensor = apply(_Region, op, x, group, forward, backward)
    return moved


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, op: str, x: Tensor, group: ProcessGroup, forward: Move, backward: Move
    ) -> Tensor:
        ctx.options = f"{op} backward", group, backward, forward
        return _move(op, x, group, forward)

    @staticmethod
    def spmd_typecheck(*, x: Tensor, group: ProcessGroup, forward: Move, backward: Move) -> spmd_rules.Typed:
        return spmd_rules.moved(x, group, forward, backward)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        op, group, backward, forward = ctx.options
        if torch.is_grad_enabled():  # a region again, whose gradient makes the forward's move
            dx = apply(_Region, op, dy, group, backward, forward)
        else:
            dx = _move(op, dy, group, backward)
        return None, dx, None, None, None


def _move(op: str, x: Tensor, group: ProcessGroup, move: Move) -> Tensor:
    if move == "keep":
        # where compiled code returns a view of a view of an input, it is taken anew of the input, without us
        return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
    return _travel(op, x, group, move)


@all_or_fail
def _moved(op: str, x: Tensor, group: Group, move: Move) -> Tensor:
    return _MOVES[move](op, x, group)


def _moved_shape(op: str, x: Tensor, group: ProcessGroup, move: Move) -> Tensor:
    ranks, shape = group.size(), list(x.shape)
    dim = -1 if move.endswith("features") else 0
    if move.startswith("all"):
        shape[dim] *= ranks
    elif move != "sum":
        shape[dim] //= ranks
    return x.new_empty(shape)


_travel = Operator("move", _moved, _moved_shape)


def _ours(dim: int, op: str, x: Tensor, group: ProcessGroup) -> Tensor:
    _require_even(op, x, dim, group)
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _all_tokens(op: str, x: Tensor, group: ProcessGroup) -> Tensor:
    whole = _gathered(op, x, _rows(x), group)
    return _shaped(whole, group.size() * x.shape[0], *x.shape[1:])


def _all_features(op: str, x: Tensor, group: ProcessGroup) -> Tensor:
    # rows of a gather are contiguous: ranks become the first dimension, and then part of the last
    parts = _gathered(op, x, x.reshape(1, x.numel()), group).view(group.size(), *x.shape).movedim(0, -2)
    return parts.reshape(*x.shape[:-1], group.size() * x.shape[-1])


def _sum_of_tokens(op: str, x: Tensor, group: ProcessGroup) -> Tensor:
    _require_even(op, x, 0, group)
    rows = _rows(x)
    ours = _summed(op, x, rows, group, scatter=True)
    return _shaped(ours, x.shape[0] // group.size(), *x.shape[1:])


def _sum(op: str, x: Tensor, group: ProcessGroup) -> Tensor:
    rows = x.reshape(x.numel(), 1)  # any number of them will do
    return _shaped(_summed(op, x, rows, group, scatter=False), *x.shape)


def _gathered(op: str, x: Tensor, shard: Tensor, group: ProcessGroup) -> Tensor:
    """Gather all ranks' shards, each of which is x as rows; no product follows, so that nothing is cut."""
    rows = group.size() * shard.shape[0]
    exchange = c10d_for(x, rows, 0, group.size(), overlap=True)
    return Gathering(begin_call(op, "x", x.shape, x, group), shard, rows, exchange).wait()


def _summed(op: str, x: Tensor, rows: Tensor, group: ProcessGroup, *, scatter: bool) -> Tensor:
    """Sum all ranks' rows, which are those of x; return all, or if scatter this rank's."""
    if backend_sums:
        require_backend_sums(op, x.device, select.requested_transport)
        call = begin_call(op, "x" + NOTE, x.shape, x, group)
        return BackendSumming(call, rows if scatter else rows.clone(), None, scatter=scatter).wait()
    exchange = c10d_for(x, rows.shape[0], 0, group.size(), overlap=True)
    waits, call = waits_for(op, exchange, x), begin_call(op, "x", x.shape, x, group)
    count, width = rows.shape
    if scatter:
        return Reducing(call, rows.__getitem__, count, width, rows, None, exchange, waits).wait()
    return all_reducing(call, rows.__getitem__, count, width, rows, None, exchange, exchange, waits).wait()


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix, one row a token."""
    return x.reshape(x.shape[0], x[0].numel() if len(x) else 0)


def _shaped(moved: Tensor, *shape: int) -> Tensor:
    """Return `moved` in the caller's shape, as no view for autograd, into which callers could not write."""
    shaped: Tensor = torch.ops.aten._unsafe_view(moved, shape)
    return shaped


def _require_even(op: str, x: Tensor, dim: int, group: ProcessGroup) -> None:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"{op}: expected dimension {dim} divisible by the {group.size()} ranks of the group, got "
            f"{tuple(x.shape)}; pad it to a multiple of {group.size()}"
        )


_MOVES: Mapping[Move, Callable[[str, Tensor, ProcessGroup], Tensor]] = {
    "sum": _sum,
    "our_features": partial(_ours, -1),
    "all_features": _all_features,
    "our_tokens": partial(_ours, 0),
    "all_tokens": _all_tokens,
    "sum_of_tokens": _sum_of_tokens,
}
