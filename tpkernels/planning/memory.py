"""Bytes on a rank: of weights, gradients and optimizer states, and of activations.

P parameters on the rank, D data-parallel ranks, e bytes an element:

    weights       e P
    gradients     4 P            fp32 sums, in buckets
    optimizer     12 P / D       two states and a copy of the weights in fp32
    activations   of each microbatch in flight: what its blocks keep, ids, positions, and the loss
    update        4 P / D        square roots in AdamW, when no activations are left

Not counted: padding of buckets, less than 64 elements a parameter and 64 D a bucket; temporaries of operators
and transfers.

The weights of a GPT, and the number of parameters on a rank.

The first stage of a pipeline holds the embedding, the last stage the head; a tied head is there a replica of
the embedding's table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from tpkernels.groups.sizes import head_size_of
from tpkernels.kernels.activation_names import GATE_OF
from tpkernels.models.config import GPTConfig
from tpkernels.planning.job import Job, RankLayout


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model, and the number of equal ones.

    split: "rows" or "columns" over tensor-parallel ranks, "vocabulary" for rows with padding, "" replicated
    is_marked: its gradient is partial under sequence parallelism
    """

    name: str
    shape: tuple[int, ...]
    split: str = ""
    count: int = 1
    is_marked: bool = False


def weights_of(model: GPTConfig) -> Iterator[Weight]:
    """Yield the weights of a GPT; weights of layers come once, with their count."""
    hidden, layers = model.hidden_size, model.num_layers
    ffn = model.ffn_hidden_size or 4 * hidden
    head = head_size_of(hidden, model.num_heads, rotary=model.max_positions is None)
    features = {"query": model.num_heads * head}
    features |= dict.fromkeys(("key", "value"), (model.num_kv_heads or model.num_heads) * head)
    is_gated = model.activation in GATE_OF
    middle = ("mlp.up", "mlp.gate") if is_gated else ("mlp.up",)
    rows = {f"attention.qkv.{name}": size for name, size in features.items()} | dict.fromkeys(middle, ffn)
    for name, size in rows.items():
        yield Weight(f"blocks.0.{name}.weight", (size, hidden), "rows", layers)
        if model.bias and not (is_gated and name in middle):  # a gated unit has no biases inside
            yield Weight(f"blocks.0.{name}.bias", (size,), "rows", layers)
    for name, size in {"attention.output": features["query"], "mlp.down": ffn}.items():
        yield Weight(f"blocks.0.{name}.weight", (hidden, size), "columns", layers)
        if model.bias:
            yield Weight(f"blocks.0.{name}.bias", (hidden,), "", layers)
    kinds = ("weight", "bias") if model.norm == "layer_norm" else ("weight",)
    for name, count in {"blocks.0.attention_norm": layers, "blocks.0.mlp_norm": layers, "norm": 1}.items():
        for kind in kinds:
            yield Weight(f"{name}.{kind}", (hidden,), "", count, is_marked=True)
    yield Weight("embedding.weight", (model.vocab_size, hidden), "vocabulary")
    if model.max_positions is not None:
        yield Weight("positions.weight", (model.max_positions, hidden), is_marked=True)
    if not model.tied:
        yield Weight("head.weight", (model.vocab_size, hidden), "vocabulary")


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of elements on one rank."""

    sharded: int = 0
    replicated: int = 0
    marked: int = 0  # of the replicated

    @property
    def total(self) -> int:
        return self.sharded + self.replicated


def parameters_of_stage(job: Job, layout: RankLayout, stage: int) -> ParameterCount:
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    counted = Counter[str]()
    for weight in weights_of(job.model):
        owner = weight.name.partition(".")[0]
        times = {
            "blocks": weight.count // layout.pipeline,
            "embedding": int(is_first or (is_last and job.model.tied)),
            "positions": int(is_first),
        }.get(owner, int(is_last))
        elements = prod(weight.shape) * times
        if weight.split == "vocabulary":
            counted["sharded"] += table_elements(job, layout.tensor) * times
        elif weight.split:
            counted["sharded"] += elements // layout.tensor
        else:
            counted["replicated"] += elements
            counted["marked"] += elements * weight.is_marked
    return ParameterCount(**counted)


def table_elements(job: Job, tensor: int) -> int:
    return job.vocabulary_rows(tensor) * job.model.hidden_size


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


def symmetric_memory(job: Job, tensor: int) -> int:
    """Return bytes of the slots in which ranks of a machine send each other rows, besides `MemoryUse`.

    They take them with TPKERNELS_TRANSPORT=symmetric, and where `auto` finds that fastest: two slots of all
    tokens for gathers, for sums and, under sequence parallelism, for the second gather of an MLP's backward.
    """
    exchanges = (2 + job.sequence_parallel) * (tensor > 1)
    return 2 * exchanges * job.tokens_at_once() * job.model.hidden_size * job.element


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
