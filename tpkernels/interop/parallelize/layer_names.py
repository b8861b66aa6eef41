"""Plans by names of layers, for models without a plan of their own.

An attention is a module with linear layers for queries, keys and values, or one layer for all three, and an
output layer. An MLP has one or two layers that widen and one layer that narrows. Nothing else is split. Names
do not say how a module uses its features: such a plan must be compared with the unsharded model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from torch import nn

from tpkernels.interop.parallelize.entries import (
    FEATURES,
    HEADS,
    Entries,
    Layers,
    Say,
    gathered,
    head_size_of_holder,
    merged,
    packed_attention,
    split_attention,
    split_evenly,
    split_parameters,
    with_vocabulary,
)
from tpkernels.interop.parallelize.hf_modules import is_conv1d, is_linear, oriented_shape
from tpkernels.interop.parallelize.plan import ParallelizePlan, Parameters, Split

Depth = Literal["heads", "heads and features", "gathered attention", "gathered", "mlp"]

NUMBERS: dict[Depth, tuple[str, ...]] = {"heads": HEADS, "heads and features": HEADS + FEATURES}
# Names relative to the attention module.
APART = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("Wq", "Wk", "Wv"),
)
TOGETHER = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv", "in_proj")
OUTPUTS = ("o_proj", "out_proj", "out_lin", "output.dense", "dense", "c_proj", "o", "Wo", "proj", "wo")
NARROWS = {
    "down_proj": (("gate_proj", "up_proj"), ("up_proj",), ("gate_up_proj",)),
    "fc2": (("fc1",),),
    "fc_out": (("fc_in",),),
    "c_proj": (("c_fc",),),
    "wo": (("wi_0", "wi_1"), ("wi",)),
    "w2": (("w1", "w3"), ("w1",)),
    "lin2": (("lin1",),),
    "linear2": (("linear1",),),
    "dense_4h_to_h": (("dense_h_to_4h",),),
    "output.dense": (("intermediate.dense",),),
    "Wo": (("Wi",),),
}
# Biases of relative positions: one number for each head.
HEAD_BIASES = ("relative_attention_bias",)
HEAD_NUMBERS = ("sinks",)
# Attributes of stacked experts that give the layout of their weights.
EXPERT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def plan_by_names(
    model: nn.Module, ranks: int, depth: Depth, say: Say, besides: ParallelizePlan | None = None
) -> ParallelizePlan:
    """Return the plan for a number of ranks; empty if no layers are known by name.

    depth: "heads": each rank computes its own heads; "heads and features": the same, if an attribute has
        their features; "gathered attention": attention weights are split, but every rank computes all heads;
        "gathered": every rank computes everything between layers; "mlp": attentions stay
    say: called with what is not split
    besides: another plan, whose layers keep their entries
    """
    parts: list[Entries] = []
    for name, module in model.named_modules():
        if depth != "mlp":
            parts += _attention(name, module, ranks, NUMBERS.get(depth), say)
        parts += _mlp(name, module, ranks, depth != "gathered", say)
        parts += _experts(name, module, ranks, say)
    said = besides or {}
    new = [part for part in parts if not any(_meets(name, other) for name in part for other in said)]
    if not new:
        return said
    return with_vocabulary(model, {**said, **merged(new)})  # type: ignore[dict-item]


def _meets(name: str, other: str) -> bool:
    """Whether one module is the other, or inside it."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _attention(
    name: str, module: nn.Module, ranks: int, numbers: tuple[str, ...] | None, say: Say
) -> Iterator[Entries]:
    for inputs, output in product(APART, OUTPUTS):
        columns, rows = _found(name, module, inputs), _found(name, module, (output,))
        if columns and rows:
            holder = next(iter(columns)).rpartition(".")[0]
            inner = module.get_submodule(inputs[0].rpartition(".")[0])
            layers = Layers(holder, columns, rows)
            if numbers is None or head_size_of_holder(inner) is None:
                yield gathered(layers, ranks)
                return
            entries = split_attention(layers, inner, ranks, say, numbers=numbers)
            for part in _of_heads(inner, ranks):
                for short, added in part.items():
                    entries.setdefault(f"{holder}.{short}" if short else holder, []).extend(added)
            yield entries
            return
    for fused, output in product(TOGETHER, OUTPUTS):
        columns, rows = _found(name, module, (fused,)), _found(name, module, (output,))
        if columns and rows:
            layers = Layers(name, columns, rows)
            packed = None if numbers is None else packed_attention(layers, module, ranks)
            yield packed or gathered(layers, ranks)
            return


def _of_heads(attention: nn.Module, ranks: int) -> Iterator[Entries]:
    """Yield entries for an attention's other parameters with one number per head, by relative names."""
    for short in HEAD_BIASES:
        table = attention._modules.get(short)
        if isinstance(table, nn.Embedding) and table.embedding_dim % ranks == 0:
            yield {short: [Split("column")]}
    for short in HEAD_NUMBERS:
        numbers = attention._parameters.get(short)
        if numbers is not None and numbers.ndim == 1 and len(numbers) % ranks == 0:
            yield {"": [Parameters(((short, 0, 1),), summed=False)]}


def _mlp(name: str, module: nn.Module, ranks: int, split: bool, say: Say) -> Iterator[Entries]:
    for narrow, choices in NARROWS.items():
        for wide in choices:
            columns, rows = _found(name, module, wide), _found(name, module, (narrow,))
            if not columns or not rows:
                continue
            outs = {oriented_shape(column)[0] for column in columns.values()}
            (width,) = (oriented_shape(row)[1] for row in rows.values())
            if outs not in ({width}, {2 * width}):
                return
            layers = Layers(name, columns, rows)
            stacked = 1 if outs == {width} else 2
            yield split_evenly(layers, ranks, say, stacked=stacked) if split else gathered(layers, ranks)
            return


def _experts(name: str, module: nn.Module, ranks: int, say: Say) -> Iterator[Entries]:
    """Yield entries for stacked experts of `transformers`, by their attributes for the weights' layout."""
    said = [getattr(module, each, None) for each in EXPERT_FLAGS]
    if not all(isinstance(each, bool) for each in said):
        return
    gate, bias, transposed, concatenated = said
    up, down = "gate_up_proj" if gate else "up_proj", "down_proj"
    weights = [module._parameters.get(short) for short in (up, down)]
    if any(weight is None or weight.ndim != 3 for weight in weights):
        return
    features, stacked = (1 if transposed else 2), 2 if gate and concatenated else 1
    split = [(up, 3 - features, stacked), (down, features, 1)]
    if bias:
        split.append((f"{up}_bias", 1, stacked))
    if entries := split_parameters(name, module, split, True, ranks, say):
        yield entries


def _found(name: str, module: nn.Module, shorts: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the layers of these names; none if a layer is missing or is not linear."""
    found = {}
    for short in shorts:
        layer: nn.Module | None = module
        for part in short.split("."):
            layer = None if layer is None else layer._modules.get(part)
        if layer is None:
            return {}
        inner = getattr(layer, "base_layer", layer)  # inside an adapter
        if not is_linear(inner) and not is_conv1d(inner):
            return {}
        found[f"{name}.{short}" if name else short] = inner
    return found
