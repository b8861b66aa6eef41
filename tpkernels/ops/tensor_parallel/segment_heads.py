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

from tpkernels.comm.calls import all_or_fail, from_entry
from tpkernels.dispatch.operators import Operator
from tpkernels.dispatch.products import sums_dtype
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context, apply
from tpkernels.ops.tensor_parallel.parallel import Group, checked_group, segments_of, start_rows, start_sum
from tpkernels.tp_invariance import tree_sum

OP = "segment_heads"


@from_entry
def segment_heads(x_shard: Tensor, group: ProcessGroup, heads: int) -> Tensor:
    """Return the head of keys or values of each of this rank's segments.

    x_shard: (tokens, batch, features of this rank)
    heads: of keys or values, over all ranks
    returns: (tokens, batch, segments of this rank, features of a head)
    """
    group = checked_group(group, OP, x_shard, options=(heads,))
    y: Tensor = apply(_SegmentHeads, x_shard, group, heads)
    return y


class _SegmentHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup, heads: int) -> Tensor:
        ctx.options = group, heads
        return _spread(x, group, heads)

    @staticmethod
    def spmd_typecheck(*, x: Tensor, group: ProcessGroup) -> spmd_rules.Typed:
        return spmd_rules.einsum("tbk->tbk_", spmd_rules.split(x, group, 2))

    @staticmethod
    @first_order(OP)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered_gradient(dy, *ctx.options), None, None


@all_or_fail
def _heads(x: Tensor, group: Group, heads: int) -> Tensor:
    tokens, batch, width = x.shape
    segments, size = segments_of(OP, group), width * group.size() // heads
    if heads % group.size():
        shard = x.movedim(-1, 0).reshape(width, tokens * batch)
        features = start_rows(OP, "gather of features", shard, group).wait()
        own = group.rank() * heads // group.size()
        ours = features[own * size :][:size].view(size, tokens, batch).movedim(0, -1)[:, :, None]
    else:
        ours = x.view(tokens, batch, width // size, size)
    return ours.repeat_interleave(segments // ours.shape[2], 2)


def _heads_shape(x: Tensor, group: ProcessGroup, heads: int) -> Tensor:
    tokens, batch, width = x.shape
    return x.new_empty(tokens, batch, segments_of(OP, group), width * group.size() // heads)


@all_or_fail
def _gradient(dy: Tensor, group: Group, heads: int) -> Tensor:
    tokens, batch, segments, size = dy.shape
    ours, width = max(1, heads // group.size()), heads * size // group.size()
    by_head = dy.to(sums_dtype(dy.dtype)).view(tokens, batch, ours, segments // ours, size)
    total = tree_sum(by_head.unbind(3))
    if heads % group.size():
        terms = total.new_zeros(heads * size, tokens * batch)
        own = group.rank() * heads // group.size()
        terms[own * size :][:size] = total.movedim(-1, 0).reshape(size, tokens * batch)
        shard = start_sum(
            f"{OP} backward",
            terms.__getitem__,
            heads * size,
            tokens * batch,
            terms,
            group,
            scatter=True,
            overlap=True,
        ).wait()
        total = shard.view(width, tokens, batch).movedim(0, -1)
    # + 0: zeros of ranks that share another head make +0 of -0
    return (total + 0).to(dy.dtype).reshape(tokens, batch, width)


def _gradient_shape(dy: Tensor, group: ProcessGroup, heads: int) -> Tensor:
    tokens, batch, _, size = dy.shape
    return dy.new_empty(tokens, batch, heads * size // group.size())


_spread = Operator(OP, _heads, _heads_shape)
_gathered_gradient = Operator(f"{OP}_backward", _gradient, _gradient_shape)
