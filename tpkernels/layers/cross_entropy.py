"""Losses over the tensor group of the current state; `ops` has them for any group."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels import ops
from tpkernels.layers.world import State, group_of
from tpkernels.ops.main_grad import accumulating
from tpkernels.ops.vocab.chunked_head import Reduction


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    group: State = None,
) -> Tensor:
    """The loss of each token, in fp32 or wider.

    vocab_parallel_logits: (..., this rank's columns), as many on every rank
    target: (...) ids, the same on all ranks
    ignore_index: a target whose loss is zero
    vocab_size: of the whole vocabulary, if columns past it are padding
    overwrite_logits: let backward put the gradient where the logits are, which are lost then
    group: a ParallelState, process group or device mesh; None: the current state
    """
    return ops.vocab_cross_entropy(
        vocab_parallel_logits,
        target,
        group_of(group),
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        overwrite_logits=overwrite_logits,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: State = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """The loss of logits hidden weightᵀ, of which only a chunk of tokens ever exists.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (this rank's columns, features), as many on every rank
    target: (tokens, ...) ids, the same on all ranks
    group: a ParallelState, process group or device mesh; None: the current state
    reduction: "mean" over targets that are not ignored (0 without any), "sum", or "none"
    vocab_size: of the whole vocabulary, if rows of weight past it are padding
    chunk_tokens: whose logits are there at a time, by default as many as hidden has elements
    gradient_accumulation_fusion: add the weight's gradient to `weight_shard.main_grad`
    """
    main_grad = None
    if gradient_accumulation_fusion and weight_shard.requires_grad and torch.is_grad_enabled():
        weight_shard, main_grad = accumulating(weight_shard, "linear_cross_entropy")
    return ops.linear_cross_entropy(
        hidden,
        weight_shard,
        target,
        group_of(group),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        vocab_size=vocab_size,
        sequence_parallel=sequence_parallel,
        chunk_tokens=chunk_tokens,
        main_grad=main_grad,
    )
