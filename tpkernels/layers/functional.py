"""Megatron's regions and losses, over the current tensor-parallel group unless another is given.

Forward and backward of each region: `tpkernels/ops/tensor_parallel/mappings.py`.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels import ops
from tpkernels.layers.linear import weight_and_main_grad
from tpkernels.layers.world import State, group_of
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.vocab.linear_cross_entropy import LossMetrics as LossMetrics
from tpkernels.ops.vocab.linear_cross_entropy import Reduction


def copy_to_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """Return the input; all-reduce its gradient."""
    return mappings.copy_to_region(input_, group_of(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """All-reduce the input into a new tensor."""
    return mappings.reduce_from_region(input_, group_of(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """Return this rank's shard of the last dimension."""
    return mappings.scatter_to_region(input_, group_of(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """All-gather the ranks' inputs along the last dimension."""
    return mappings.gather_from_region(input_, group_of(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """Return this rank's shard of dimension 0."""
    return mappings.scatter_to_sequence_region(input_, group_of(group))


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: State = None
) -> Tensor:
    """All-gather the ranks' inputs along dimension 0.

    tensor_parallel_output_grad: the next op is split over the ranks, so that each rank's gradient is partial
        and they are summed; False: all ranks have the full gradient
    """
    return mappings.gather_from_sequence_region(
        input_, group_of(group), tensor_parallel_output_grad=tensor_parallel_output_grad
    )


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: State = None) -> Tensor:
    """Reduce-scatter the ranks' inputs along dimension 0."""
    return mappings.reduce_scatter_to_sequence_region(input_, group_of(group))


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    overwrite_logits: bool = False,
    group: State = None,
) -> Tensor:
    """Compute the cross-entropy of each token, in fp32 or wider, of logits that are split over ranks.

    vocab_parallel_logits: (..., this rank's columns), the same number on every rank
    target: (...) ids, the same on all ranks
    ignore_index: a target whose loss is zero
    vocab_size: of the full vocabulary, if columns past it are padding
    class_weight: (vocab_size,) of all ids, the same on all ranks, without a gradient
    z_loss: coefficient of the squared logarithm of Σ exp(logits), which is added to the loss
    overwrite_logits: let backward write the gradient into the memory of the logits
    group: a ParallelState, process group or device mesh; None: the current state
    """
    return ops.vocab_cross_entropy(
        vocab_parallel_logits,
        target,
        group_of(group),
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        class_weight=class_weight,
        z_loss=z_loss,
        overwrite_logits=overwrite_logits,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: State = None,
    bias_shard: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    metrics: LossMetrics | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
    quantize: Recipe | None = None,
) -> Tensor:
    """Compute the cross-entropy of logits hidden weightᵀ + bias, one chunk of tokens at a time.

    hidden: (tokens, ..., features), or this rank's tokens of dimension 0 if sequence_parallel
    weight_shard: (this rank's columns, features), the same number on every rank
    target: (tokens, ...) ids, the same on all ranks
    group: a ParallelState, process group or device mesh; None: the current state
    bias_shard: (this rank's columns,)
    softcap: bounds logits to softcap tanh(logits / softcap)
    class_weight, z_loss: as in `vocab_parallel_cross_entropy`; "mean" divides by the class weights of targets
    metrics: where the z-loss and the accuracy are written
    reduction: "mean" over targets that are not ignored (0 without any), "sum", or "none"
    vocab_size: of the full vocabulary, if rows of weight past it are padding
    chunk_tokens: tokens in a chunk; by default its logits have as many elements as hidden
    gradient_accumulation_fusion: add the weight's gradient to `weight_shard.main_grad`
    quantize: compute the products in fp8
    """
    weight_shard, main_grad = weight_and_main_grad(
        weight_shard, "linear_cross_entropy", gradient_accumulation_fusion
    )
    return ops.linear_cross_entropy(
        hidden,
        weight_shard,
        target,
        group_of(group),
        bias_shard=bias_shard,
        softcap=softcap,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        class_weight=class_weight,
        z_loss=z_loss,
        reduction=reduction,
        metrics=metrics,
        vocab_size=vocab_size,
        sequence_parallel=sequence_parallel,
        chunk_tokens=chunk_tokens,
        main_grad=main_grad,
        quantize=quantize,
    )


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: State = None,
    bias_shard: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
    quantize: Recipe | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities of targets under logits hidden weightᵀ / temperature, one chunk at a time.

    target: (tokens, ...) ids, the same on all ranks, or (tokens, ..., n): n targets of each token
    top_k: only the k largest logits of a token count, and logits equal to the smallest of these, as in
        `TopKLogitsWarper` of transformers; other targets have minus infinity and no gradient
    return_entropy: also return the entropy over the ids that count, at the temperature
    ignore_index: a target whose log-probability and gradient are 0; the entropy is 0 if all n are ignored
    Others as in `linear_cross_entropy`.
    returns: log-probabilities (like target), and entropies (tokens, ...) or None; in fp32 or wider
    """
    weight_shard, main_grad = weight_and_main_grad(
        weight_shard, "linear_logprobs", gradient_accumulation_fusion
    )
    return ops.linear_logprobs(
        hidden,
        weight_shard,
        target,
        group_of(group),
        bias_shard=bias_shard,
        softcap=softcap,
        temperature=temperature,
        top_k=top_k,
        return_entropy=return_entropy,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        sequence_parallel=sequence_parallel,
        chunk_tokens=chunk_tokens,
        main_grad=main_grad,
        quantize=quantize,
    )
