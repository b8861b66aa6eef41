"""Bytes on a rank: of weights, gradients and optimizer states, and of activations.

P parameters on the rank, D data-parallel ranks, e bytes an element:

    weights       e P
    gradients     4 P            fp32 sums, in buckets
    optimizer     12 P / D       two states and a copy of the weights in fp32
    activations   of each microbatch in flight: what its blocks keep, ids, positions, and the loss
    update        4 P / D        square roots in AdamW, when no activations are left

Not counted: padding of buckets, less than 64 elements a parameter and 64 D a bucket; temporaries of operators
and transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.parameters import parameters_of_stage, table_elements

GRADIENT = 4  # bytes of a sum of gradients
OPTIMIZER = 12  # of exp_avg, exp_avg_sq and the copy of a weight
ROOT = 4  # of exp_avg_sq's root, which torch computes for many tensors at once


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on a rank of one stage."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    update: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.update)


def memory_of(job: Job, layout: RankLayout) -> MemoryUse:
    """Return the memory of a rank in the stage that needs most."""
    return max(
        (memory_of_stage(job, layout, stage) for stage in range(layout.pipeline)), key=lambda m: m.peak
    )


def memory_of_stage(job: Job, layout: RankLayout, stage: int) -> MemoryUse:
    count, data = parameters_of_stage(job, layout, stage).total, layout.data
    return MemoryUse(
        weights=job.element * count,
        gradients=GRADIENT * count,
        optimizer=OPTIMIZER * count // data,
        activations=activations_of_stage(job, layout, stage),
        update=ROOT * count // data,
    )


def activations_of_stage(job: Job, layout: RankLayout, stage: int) -> int:
    """Return bytes of a stage's activations, with the microbatches in flight of a 1F1B schedule."""
    in_flight = min(layout.pipeline - stage, job.micro_batches(layout))
    blocks = job.model.num_layers // layout.pipeline
    held = blocks * kept_by_block(job, layout.tensor) + kept_by_rotation(job)
    if stage == 0:
        held += 8 * job.tokens_at_once()  # ids
    if stage == layout.pipeline - 1:
        held += kept_by_head(job, layout.tensor)
    return in_flight * held + recomputed_at_once(job, layout.tensor)


def kept_by_block(job: Job, tensor: int) -> int:
    """Return the bytes that a block saves of one microbatch for backward: the table in docs/models.md."""
    tokens, hidden, element = job.tokens_at_once(), job.model.hidden_size, job.element
    own_tokens = tokens // tensor if job.is_split(tensor) else tokens
    if job.recompute == "full":
        return own_tokens * hidden * element
    heads = job.model.num_heads // tensor
    between = 4 * own_tokens * hidden  # inputs of two norms and of two products
    # queries, keys, values, and the output of attention
    attention = tokens * (2 * heads + 2 * job.kv_heads_of_rank(tensor)) * job.head_size
    mlp = tokens * job.ups * job.ffn // tensor
    sums = 0 if job.recompute == "selective" else tokens * heads
    return (between + attention + mlp) * element + 4 * sums + 2 * _kept_statistics(job, own_tokens)


def kept_by_rotation(job: Job) -> int:
    """Return bytes of the sines and cosines of all positions, once for all blocks of a forward."""
    return 0 if job.model.max_positions else 4 * job.tokens * job.head_size


def kept_by_head(job: Job, tensor: int) -> int:
    """Return bytes of the last norm's input, and of gradients that the loss computes in forward already."""
    tokens, hidden = job.tokens_at_once(), job.model.hidden_size
    own_tokens = tokens // tensor if job.is_split(tensor) else tokens
    of_loss = tokens * hidden * job.element + 4 * table_elements(job, tensor) + 4  # 4: the count of tokens
    return own_tokens * hidden * job.element + _kept_statistics(job, own_tokens) + of_loss


def recomputed_at_once(job: Job, tensor: int) -> int:
    """Return bytes of the one block that backward has recomputed."""
    if job.recompute != "full":
        return 0
    return kept_by_block(replace(job, recompute="none"), tensor) - kept_by_block(job, tensor)


def _kept_statistics(job: Job, own_tokens: int) -> int:
    """Return bytes of a norm's statistics, in fp32."""
    return 4 * own_tokens * (2 if job.model.norm == "layer_norm" else 1)
