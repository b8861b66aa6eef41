"""Embedding of ids whose table is split over ranks.

R ranks, T tokens, H features, V rows a rank:

    ids   (T,)            the same on all ranks        w_shard  (V, H)    our rows of the table
    y     (T, H)          on every rank; under sequence parallelism y_shard (T / R, H), our tokens

    forward   y_shard  = reduce_scatter(rows that we have, zeros for the others)
    wgrad     dw_shard = Σ of the rows of all_gather(dy_shard) that belong to an id of ours

Without sequence parallelism y is all-reduced, and backward communicates nothing. Each row comes from one rank
and zeros from the others: the sum is exact in any dtype. Gradients are summed in fp32, in the order of
tokens.

Saved for backward: ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.vocabulary_steps import vocabulary_steps_on
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import compiling
from tpkernels.ops.tensor_parallel.parallel import (
    checked_group,
    group_named,
    name_of,
    require_divisible,
    start_rows,
    start_sum,
)
from tpkernels.ops.vocab.vocabulary import VocabShard, require_ids, require_in_vocabulary, vocab_shard

NOWHERE = -1  # an id that no rank has


@dataclass(frozen=True)
class EmbeddingCall:
    """What a call is besides its tensors."""

    shard: VocabShard
    sequence_parallel: bool
    padding_idx: int | None

    def as_options(self) -> tuple[str, int, bool, int | None]:
        """As an operator takes it."""
        return name_of(self.shard.group), self.shard.size, self.sequence_parallel, self.padding_idx


def vocab_embedding(
    ids: Tensor,
    weight_shard: Tensor,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    padding_idx: int | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The rows of the whole table that ids name, as `F.embedding`.

    ids: (tokens, ...), the same on all ranks
    weight_shard: (rows of this rank, features), as many on every rank
    padding_idx: an id whose row gets no gradient
    vocab_size: of the whole vocabulary, if rows past it are padding
    returns: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    """
    op = "vocab_embedding"
    if weight_shard.ndim != 2 or not weight_shard.is_floating_point():
        raise ValueError(
            f"{op}: expected floating-point weight_shard (rows, features), got "
            f"{tuple(weight_shard.shape)} in {weight_shard.dtype}"
        )
    width, features = weight_shard.shape
    group = checked_group(
        group,
        op,
        dtype=weight_shard.dtype,
        rows=(*ids.shape, width),
        width=features,
        tensors=[weight_shard],
        options=(sequence_parallel, padding_idx, vocab_size),
    )
    shard = vocab_shard(op, group, width, vocab_size)
    if padding_idx is not None:
        if not -shard.size <= padding_idx < shard.size:
            raise ValueError(
                f"{op}: expected a padding_idx from {-shard.size} to {shard.size - 1}, got {padding_idx}"
            )
        padding_idx %= shard.size
    require_ids(op, "ids", ids, weight_shard)
    leading = list(ids.shape)
    if sequence_parallel:
        if ids.ndim < 1:
            raise ValueError(f"{op}: expected ids (tokens, ...) with sequence_parallel, got a single id")
        require_divisible(op, ids, group)
        leading[0] //= group.size()
    call = EmbeddingCall(shard, sequence_parallel, padding_idx)
    flat_ids = ids.reshape(-1).contiguous()
    y: Tensor
    if compiling(op):
        y = registered_vocab_embedding(flat_ids, weight_shard, *call.as_options())
    else:
        y = _VocabEmbedding.apply(call, flat_ids, weight_shard)  # type: ignore[no-untyped-call]
    return y.view(*leading, features)


class _VocabEmbedding(torch.autograd.Function):
    """The eager way, straight to kernels and transfers."""

    @staticmethod
    def forward(ctx: Any, call: EmbeddingCall, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.call, ctx.dtype = call, weight.dtype
        ctx.save_for_backward(ids if ctx.needs_input_grad[2] else None)
        return embedding_forward(call, ids, weight)

    @staticmethod
    @first_order("vocab_embedding")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return None, None, embedding_gradient(ctx.call, ids, dy, ctx.dtype)


@all_or_fail
def embedding_forward(call: EmbeddingCall, ids: Tensor, weight: Tensor) -> Tensor:
    op, shard, steps = "vocab_embedding", call.shard, vocabulary_steps_on(weight)
    require_in_vocabulary(op, "ids", ids, shard)
    return start_sum(
        op,
        lambda rows: steps.lookup(ids[rows], weight, shard.first_id),
        len(ids),
        weight.shape[1],
        weight,
        shard.group,
        scatter=call.sequence_parallel,
        overlap=True,
    ).wait()


@all_or_fail
def embedding_gradient(call: EmbeddingCall, ids: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    shard = call.shard
    if call.sequence_parallel:
        dy = start_rows("vocab_embedding backward", "gather of dy", dy, shard.group).wait()
    if call.padding_idx is not None:
        ids = torch.where(ids == call.padding_idx, NOWHERE, ids)
    return vocabulary_steps_on(dy).lookup_grad(dy, ids, shard.width, shard.first_id, dtype)


# Under torch.compile: both directions as operators, which name their group.


@torch.library.custom_op("tpkernels::vocab_embedding", mutates_args=())
def registered_vocab_embedding(
    ids: Tensor,
    weight: Tensor,
    group_name: str,
    vocab_size: int,
    sequence_parallel: bool,
    padding_idx: int | None,
) -> Tensor:
    shard = VocabShard.named(group_name, weight.shape[0], vocab_size)
    return embedding_forward(EmbeddingCall(shard, sequence_parallel, padding_idx), ids, weight)


@registered_vocab_embedding.register_fake
def _(
    ids: Tensor,
    weight: Tensor,
    *options: Any,
) -> Tensor:
    group_name, _, sequence_parallel, _ = options
    ranks = group_named(group_name).size() if sequence_parallel else 1
    return weight.new_empty(ids.shape[0] // ranks, weight.shape[1])


@torch.library.custom_op("tpkernels::vocab_embedding_backward", mutates_args=())
def registered_vocab_embedding_backward(
    dy: Tensor,
    ids: Tensor,
    width: int,
    dtype: torch.dtype,
    group_name: str,
    vocab_size: int,
    sequence_parallel: bool,
    padding_idx: int | None,
) -> Tensor:
    shard = VocabShard.named(group_name, width, vocab_size)
    return embedding_gradient(EmbeddingCall(shard, sequence_parallel, padding_idx), ids, dy, dtype)


@registered_vocab_embedding_backward.register_fake
def _(
    dy: Tensor,
    ids: Tensor,
    width: int,
    dtype: torch.dtype,
    *options: Any,
) -> Tensor:
    return dy.new_empty(width, dy.shape[1], dtype=dtype)


def _registered_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight, *ctx.options = inputs
    ctx.width, ctx.dtype = weight.shape[0], weight.dtype
    ctx.save_for_backward(ids)


def _registered_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    dweight = registered_vocab_embedding_backward(dy, ids, ctx.width, ctx.dtype, *ctx.options)
    return None, dweight, None, None, None, None


registered_vocab_embedding.register_autograd(_registered_backward, setup_context=_registered_save)
