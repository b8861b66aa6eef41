"""The weights of a GPT, and the number of parameters on a rank.

The first stage of a pipeline holds the embedding, the last stage the head; a tied head is there a replica of
the embedding's table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tpkernels.kernels.activation_names import GATE_OF
from tpkernels.models.config import GPTConfig
from tpkernels.planning.job import Job, RankLayout
from tpkernels.topology.sizes import head_size_of


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

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(
            self.sharded + other.sharded, self.replicated + other.replicated, self.marked + other.marked
        )

    def times(self, count: int) -> ParameterCount:
        return ParameterCount(self.sharded * count, self.replicated * count, self.marked * count)


def parameters_of_stage(job: Job, layout: RankLayout, stage: int) -> ParameterCount:
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    found = ParameterCount()
    for weight in weights_of(job.model):
        owner = weight.name.partition(".")[0]
        times = {
            "blocks": weight.count // layout.pipeline,
            "embedding": int(is_first or (is_last and job.model.tied)),
            "positions": int(is_first),
        }.get(owner, int(is_last))
        found += _on_a_rank(weight, job, layout.tensor).times(times)
    return found


def table_elements(job: Job, tensor: int) -> int:
    return job.vocabulary_rows(tensor) * job.model.hidden_size


def _on_a_rank(weight: Weight, job: Job, tensor: int) -> ParameterCount:
    if weight.split == "vocabulary":
        return ParameterCount(sharded=table_elements(job, tensor))
    elements = prod(weight.shape)
    if weight.split:
        return ParameterCount(sharded=elements // tensor)
    return ParameterCount(replicated=elements, marked=elements * weight.is_marked)
