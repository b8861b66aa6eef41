"""Embedding lookup in a table that is sharded over ranks.

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

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch import vocabulary
from tpkernels.ops import spmd_rules
from tpkernels.ops.first_order import differentiated_once, first_order
from tpkernels.ops.inputs import Context, computed
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.parallel import (
    SplitOperator,
    compare_request,
    refuse_uneven,
    split_of,
)
from tpkernels.ops.vocab.vocabulary import (
    VocabShard,
    is_alone,
    require_ids,
    require_in_vocabulary,
    vocab_shard,
)

OP = "vocab_embedding"


def vocab_embedding(
    ids: Tensor,
    weight_shard: Tensor,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    padding_idx: int | None = None,
    vocab_size: int | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Look up the rows of ids in the full table, as `F.embedding`.

    ids: (tokens, ...), the same on all ranks
    weight_shard: (rows of this rank, features), the same number on every rank
    padding_idx: an id whose row gets no gradient
    vocab_size: of the full vocabulary, if rows past it are padding
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    returns: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    """
    tp = split_of(OP, group, sequence_parallel, segments=tp_invariant)
    with tp.call:
        # without features torch does not look at ids; gradients narrower than fp32 it sums as they are
        plain = weight_shard.ndim == 2 and weight_shard.dtype in (torch.float32, torch.float64)
        plain = plain and weight_shard.shape[1] > 0 and ids.is_cpu and (ids.ndim > 0 or not sequence_parallel)
        if vocab_size is None and padding_idx is None and plain and is_alone(tp, weight_shard):
            try:
                return differentiated_once(OP, torch.embedding(weight_shard, ids))
            except (IndexError, RuntimeError):
                pass  # what does not fit, and ids that are none, are told below, in our words
        if weight_shard.ndim != 2 or not weight_shard.is_floating_point():
            raise ValueError(
                f"{OP}: expected floating-point weight_shard (rows, features), got "
                f"{tuple(weight_shard.shape)} in {weight_shard.dtype}"
            )
        leading, (width, features) = ids.shape, weight_shard.shape
        compare_request(OP, tp, weight_shard, options=(padding_idx, vocab_size), rows=(*leading, width))
        size = vocab_shard(OP, tp, width, vocab_size).size
        if padding_idx is not None:
            if not -size <= padding_idx < size:
                raise ValueError(
                    f"{OP}: expected a padding_idx from {-size} to {size - 1}, got {padding_idx}"
                )
            padding_idx %= size
        require_ids(OP, "ids", ids, weight_shard)
        if sequence_parallel:
            if not leading:
                raise ValueError(f"{OP}: expected ids (tokens, ...) with sequence_parallel, got a single id")
            if ids.shape[0] % tp.ranks:
                refuse_uneven(OP, ids, tp)
        if len(leading) != 1:
            ids = ids.reshape(-1)
        arguments = ids.contiguous(), weight_shard, tp, size, padding_idx
        y: Tensor = computed(_VocabEmbedding, *arguments)
        if len(leading) == 1:
            return y
        if sequence_parallel:
            return y.view(leading[0] // tp.ranks, *leading[1:], features)
        return y.view(*leading, features)


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        ids: Tensor,
        weight: Tensor,
        tp: TensorParallel,
        vocab_size: int,
        padding_idx: int | None,
    ) -> Tensor:
        ctx.tp, ctx.table = tp, (weight.shape[0], weight.dtype, padding_idx)
        ctx.save_for_backward(ids if ctx.needs_input_grad[1] else None)
        y: Tensor
        (y,) = _rows_of_ids(ids, weight, vocab_size, tp=tp, matmul=PLAIN)
        return y

    @staticmethod
    def spmd_typecheck(*, ids: Tensor, weight: Tensor, tp: TensorParallel) -> spmd_rules.Typed:
        group = tp.group
        rows = spmd_rules.einsum("t,vh->th", spmd_rules.full(ids, group), spmd_rules.split(weight, group, 0))
        return spmd_rules.summed(rows, group, scatter=tp.sequence_parallel)

    @staticmethod
    @first_order(OP)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), tp = ctx.saved_tensors, ctx.tp
        with tp.call:
            (dweight,) = _table_gradient(dy, ids, *ctx.table, tp=tp, matmul=PLAIN)
        return None, dweight, None, None, None


def _rows(ids: Tensor, weight: Tensor, vocab_size: int, tp: TensorParallel, _: Plain) -> list[Tensor]:
    shard = VocabShard(tp, weight.shape[0], vocab_size)
    require_in_vocabulary(OP, "ids", ids, shard)
    first_id = shard.first_id
    if tp.ranks == 1:
        rows = vocabulary.lookup(ids, weight, 0)
        return [rows.add_(0) if tp.segments else rows]  # elsewhere zeros of others make +0 of -0
    terms = Terms(
        len(ids),
        weight.shape[1],
        weight,
        lambda rows: vocabulary.lookup(ids[rows], weight, first_id),
        tree=tp.segments > 0,
    )
    return [tp.reduce(OP, terms).wait()]


def _rows_shape(ids: Tensor, weight: Tensor, vocab_size: int, tp: TensorParallel, _: Plain) -> list[Tensor]:
    return [weight.new_empty(ids.shape[0] // tp.token_shards, weight.shape[1])]


def _gradient(
    dy: Tensor,
    ids: Tensor,
    rows: int,
    dtype: torch.dtype,
    padding_idx: int | None,
    tp: TensorParallel,
    _: Plain,
) -> list[Tensor]:
    first_id = tp.rank * rows
    dy = tp.gather(f"{OP} backward", "dy", dy).all()
    parts = VocabShard(tp, rows, tp.ranks * rows).segments
    found = [vocabulary.lookup_grad(dy, ids, rows // len(parts), part.first_id, dtype) for part in parts]
    dweight = found[0] if len(found) == 1 else torch.cat(found)
    if padding_idx is not None and 0 <= padding_idx - first_id < rows:
        dweight[padding_idx - first_id] = 0
    return [dweight]


def _gradient_shape(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype, *_: object) -> list[Tensor]:
    return [dy.new_empty(rows, dy.shape[1], dtype=dtype)]


_rows_of_ids = SplitOperator(OP, "Tensor ids, Tensor weight, SymInt vocab_size", _rows, _rows_shape)
_table_gradient = SplitOperator(
    f"{OP}_backward",
    "Tensor dy, Tensor ids, SymInt rows, ScalarType dtype, int? padding_idx",
    _gradient,
    _gradient_shape,
)
