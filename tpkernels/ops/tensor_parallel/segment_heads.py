"""Heads of keys and values that several segments of query heads share, with TP-invariance.

R ranks, S segments, G heads of keys and values (G < S, G divides S), T tokens, d features of a head:

    x_shard   (T, batch, G d / R)        this rank's shard of the features of all heads
    y_shard   (T, batch, S / R, d)       for each of this rank's segments the head that serves it

    forward   y_shard = heads of all_gather(x_shard), or of x_shard where ranks hold whole heads
    backward  dx      = the sum over segments that share a head, in fp32, in a tree: this rank's first, then
                        those of ranks: reduce_scatter

So the gradient of a shared head has the same bits whether its segments are on one rank or on several.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch.products import sums_dtype
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, apply
from tpkernels.ops.matmul import Plain
from tpkernels.ops.tensor_parallel.parallel import (
    SplitOperator,
    compare_request,
    split_of,
    strategy_of,
)
from tpkernels.tp_invariance import tree_sum

OP = "segment_heads"


def segment_heads(
    x_shard: Tensor, group: ProcessGroup, heads: int, *, tp_invariant: int | None = None
) -> Tensor:
    """Return the head of keys or values of each of this rank's segments.

    x_shard: (tokens, batch, features of this rank)
    heads: of keys or values, over all ranks
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    returns: (tokens, batch, segments of this rank, features of a head)
    """
    tp = split_of(OP, group, segments=tp_invariant)
    with tp.call:
        compare_request(OP, tp, x_shard, options=(heads,))
        y: Tensor = apply(_SegmentHeads, x_shard, tp, strategy_of(OP, tp, None, x_shard), heads)
    return y


class _SegmentHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, tp: TensorParallel, matmul: Plain, heads: int) -> Tensor:
        ctx.options = tp, matmul, heads
        y: Tensor
        (y,) = _spread(x, heads, tp=tp, matmul=matmul)
        return y

    @staticmethod
    def spmd_typecheck(*, x: Tensor, tp: TensorParallel) -> spmd_rules.Typed:
        return spmd_rules.einsum("tbk->tbk_", spmd_rules.split(x, tp.group, 2))

    @staticmethod
    @first_order(OP)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        tp, matmul, heads = ctx.options
        with tp.call:
            (dx,) = _gathered_gradient(dy, heads, tp=tp, matmul=matmul)
        return dx, None, None, None


def _heads(x: Tensor, heads: int, tp: TensorParallel, matmul: Plain) -> list[Tensor]:
    tokens, batch, width = x.shape
    size = width * tp.ranks // heads
    if heads % tp.ranks:
        shard = x.movedim(-1, 0).reshape(width, tokens * batch)
        features = tp.gather(OP, "features", shard, everywhere=True).all()
        own = tp.rank * heads // tp.ranks
        ours = features[own * size :][:size].view(size, tokens, batch).movedim(0, -1)[:, :, None]
    else:
        ours = x.view(tokens, batch, width // size, size)
    return [ours.repeat_interleave(matmul.segments // ours.shape[2], 2)]


def _heads_shape(x: Tensor, heads: int, tp: TensorParallel, matmul: Plain) -> list[Tensor]:
    tokens, batch, width = x.shape
    return [x.new_empty(tokens, batch, matmul.segments, width * tp.ranks // heads)]


def _gradient(dy: Tensor, heads: int, tp: TensorParallel, matmul: Plain) -> list[Tensor]:
    tokens, batch, segments, size = dy.shape
    ours, width = max(1, heads // tp.ranks), heads * size // tp.ranks
    by_head = dy.to(sums_dtype(dy.dtype)).view(tokens, batch, ours, segments // ours, size)
    total = tree_sum(by_head.unbind(3))
    if heads % tp.ranks:
        terms = total.new_zeros(heads * size, tokens * batch)
        own = tp.rank * heads // tp.ranks
        terms[own * size :][:size] = total.movedim(-1, 0).reshape(size, tokens * batch)
        rows = Terms(terms.shape[0], terms.shape[1], terms, terms.__getitem__, tree=True)
        shard = tp.reduce_scatter(f"{OP} backward", rows).wait()
        total = shard.view(width, tokens, batch).movedim(0, -1)
    # + 0: zeros of ranks that share another head make +0 of -0
    return [(total + 0).to(dy.dtype).reshape(tokens, batch, width)]


def _gradient_shape(dy: Tensor, heads: int, tp: TensorParallel, _: Plain) -> list[Tensor]:
    tokens, batch, _segments, size = dy.shape
    return [dy.new_empty(tokens, batch, heads * size // tp.ranks)]


_spread = SplitOperator(
    OP,
    "Tensor x, int heads",
    _heads,
    _heads_shape,
)
_gathered_gradient = SplitOperator(
    f"{OP}_backward",
    "Tensor dy, int heads",
    _gradient,
    _gradient_shape,
)
