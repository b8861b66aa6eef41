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

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import Context, apply
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.parallel import SplitOperator, compare_request, split_of

Move = Literal["keep", "sum", "our_features", "all_features", "our_tokens", "all_tokens", "sum_of_tokens"]


def copy_to_region(x: Tensor, group: ProcessGroup, *, tp_invariant: int | None = None) -> Tensor:
    """Return x; all-reduce its gradient."""
    return _region("copy_to_region", x, group, "keep", "sum", tp_invariant)


def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce x."""
    return _region("reduce_from_region", x, group, "sum", "keep")


def scatter_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's shard of the features of x, which is the same on all ranks."""
    return _region("scatter_to_region", x, group, "our_features", "all_features")


def gather_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather features; each rank has a shard."""
    return _region("gather_from_region", x, group, "all_features", "our_features")


def scatter_to_sequence_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's shard of the tokens of x, which is the same on all ranks."""
    return _region("scatter_to_sequence_region", x, group, "our_tokens", "all_tokens")


def gather_from_sequence_region(
    x: Tensor,
    group: ProcessGroup,
    *,
    tensor_parallel_output_grad: bool = True,
    tp_invariant: int | None = None,
) -> Tensor:
    """All-gather tokens; each rank has a shard.

    tensor_parallel_output_grad: the next op is split over ranks, so that gradients are partial, and are
        reduce-scattered; False: all ranks have the full gradient, and each takes its tokens
    """
    backward: Move = "sum_of_tokens" if tensor_parallel_output_grad else "our_tokens"
    return _region("gather_from_sequence_region", x, group, "all_tokens", backward, tp_invariant)


def reduce_scatter_to_sequence_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Reduce-scatter x over tokens."""
    return _region("reduce_scatter_to_sequence_region", x, group, "sum_of_tokens", "all_tokens")


def _region(
    op: str,
    x: Tensor,
    group: ProcessGroup,
    forward: Move,
    backward: Move,
    tp_invariant: int | None = None,
) -> Tensor:
    tp = split_of(op, group, segments=tp_invariant)
    with tp.call:
        if x.ndim < 1:
            raise ValueError(f"{op}: expected at least one dimension, got a tensor without")
        compare_request(op, tp, x, options=(forward, backward))
        recorded = torch.is_grad_enabled() and x.requires_grad
        if tp.segments and (forward.startswith("sum") or (recorded and backward.startswith("sum"))):
            raise ValueError(
                f"{op}: expected no sum of what ranks computed by themselves with TP-invariance, for nobody "
                "knows how that depends on their number; use the parallel layers, or turn TP-invariance off"
            )
        if tp.ranks == 1:
            return x
        moved: Tensor = apply(_Region, op, x, tp, forward, backward)
    return moved


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, op: str, x: Tensor, tp: TensorParallel, forward: Move, backward: Move
    ) -> Tensor:
        ctx.options = f"{op} backward", tp, backward, forward
        return _move(op, x, tp, forward)

    @staticmethod
    def spmd_typecheck(*, x: Tensor, tp: TensorParallel, forward: Move, backward: Move) -> spmd_rules.Typed:
        return spmd_rules.moved(x, tp, forward, backward)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        op, tp, backward, forward = ctx.options
        with tp.call:
            if torch.is_grad_enabled():  # a region again, whose gradient makes the forward's move
                dx = apply(_Region, op, dy, tp, backward, forward)
            else:
                dx = _move(op, dy, tp, backward)
        return None, dx, None, None, None


def _move(op: str, x: Tensor, tp: TensorParallel, move: Move) -> Tensor:
    if move == "keep":
        # where compiled code returns a view of a view of an input, it is taken anew of the input, without us
        return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
    moved: Tensor
    (moved,) = _travel(op, x, move, tp=tp, matmul=PLAIN)
    return moved


def _moved(op: str, x: Tensor, move: Move, tp: TensorParallel, _: Plain) -> list[Tensor]:
    return [_MOVES[move](op, x.resolve_neg(), tp.over_c10d())]  # no product follows, so that nothing is cut


def _moved_shape(op: str, x: Tensor, move: Move, tp: TensorParallel, _: Plain) -> list[Tensor]:
    shape = list(x.shape)
    dim = -1 if move.endswith("features") else 0
    if move.startswith("all"):
        shape[dim] *= tp.ranks
    elif move != "sum":
        shape[dim] //= tp.ranks
    return [x.new_empty(shape)]


_travel = SplitOperator(
    "move",
    "str op, Tensor x, str move",
    _moved,
    _moved_shape,
)


def _ours(dim: int, op: str, x: Tensor, tp: TensorParallel) -> Tensor:
    _require_even(op, x, dim, tp)
    return x.chunk(tp.ranks, dim)[tp.rank].clone(memory_format=torch.contiguous_format)


def _all_tokens(op: str, x: Tensor, tp: TensorParallel) -> Tensor:
    whole = tp.gather(op, "x", _rows(x), everywhere=True).all()
    return _shaped(whole, tp.ranks * x.shape[0], *x.shape[1:])


def _all_features(op: str, x: Tensor, tp: TensorParallel) -> Tensor:
    # rows of a gather are contiguous: ranks become the first dimension, and then part of the last
    gathered = tp.gather(op, "x", x.reshape(1, x.numel()), everywhere=True).all()
    parts = gathered.view(tp.ranks, *x.shape).movedim(0, -2)
    return parts.reshape(*x.shape[:-1], tp.ranks * x.shape[-1])


def _sum_of_tokens(op: str, x: Tensor, tp: TensorParallel) -> Tensor:
    _require_even(op, x, 0, tp)
    ours = tp.reduce_scatter(op, _terms(_rows(x))).wait()
    return _shaped(ours, x.shape[0] // tp.ranks, *x.shape[1:])


def _sum(op: str, x: Tensor, tp: TensorParallel) -> Tensor:
    rows = x.reshape(x.numel(), 1)  # any number of them will do
    return _shaped(tp.all_reduce(op, _terms(rows)).wait(), *x.shape)


def _terms(rows: Tensor) -> Terms:
    return Terms(rows.shape[0], rows.shape[1], rows, rows.__getitem__)


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix, one row a token."""
    return x.reshape(x.shape[0], x[0].numel() if len(x) else 0)


def _shaped(moved: Tensor, *shape: int) -> Tensor:
    """Return `moved` in the caller's shape, as no view for autograd, into which callers could not write."""
    shaped: Tensor = torch.ops.aten._unsafe_view(moved, shape)
    return shaped


def _require_even(op: str, x: Tensor, dim: int, tp: TensorParallel) -> None:
    if x.shape[dim] % tp.ranks:
        raise ValueError(
            f"{op}: expected dimension {dim} divisible by the {tp.ranks} ranks of the group, got "
            f"{tuple(x.shape)}; pad it to a multiple of {tp.ranks}"
        )


_MOVES: Mapping[Move, Callable[[str, Tensor, TensorParallel], Tensor]] = {
    "sum": _sum,
    "our_features": partial(_ours, -1),
    "all_features": _all_features,
    "our_tokens": partial(_ours, 0),
    "all_tokens": _all_tokens,
    "sum_of_tokens": _sum_of_tokens,
}
