"""Plans of models that bring none, by how their layers are called.

An attention is a module with linear layers for queries, keys and values, or for all three, and one for its
output; an MLP has one or two that widen and one that narrows. Nothing else is split. Names do not say what a
module does with its features: such a plan is to be compared with the unsharded model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from torch import nn

from tpkernels.interop.parallelize.attention import (
    Entries,
    Layers,
    Say,
    gathered,
    head_size_of_holder,
    merged,
    split_attention,
    split_evenly,
)
from tpkernels.interop.parallelize.hf_modules import is_conv1d, oriented_shape
from tpkernels.interop.parallelize.plan import Divided, Plan, Split
from tpkernels.interop.parallelize.vocabulary import with_vocabulary

Depth = Literal["heads", "gathered", "mlp"]

# From the module that holds them.
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
# Of positions relative to each other: one number for each head.
HEAD_BIASES = ("relative_attention_bias",)


def plan_by_names(model: nn.Module, ranks: int, depth: Depth, say: Say) -> Plan:
    """The plan for a number of ranks; empty if no layers are known by name.

    depth: "heads": each rank computes its own heads; "gathered": attention weights are split, but every rank
        computes all heads; "mlp": attentions stay
    say: is told what is not split
    """
    parts: list[Entries] = []
    for name, module in model.named_modules():
        if depth != "mlp":
            parts += _attention(name, module, ranks, depth, say)
        parts += _mlp(name, module, ranks, say)
    plan = merged(parts)
    return with_vocabulary(model, plan) if plan else plan


def _attention(name: str, module: nn.Module, ranks: int, depth: Depth, say: Say) -> Iterator[Entries]:
    for inputs, output in product(APART, OUTPUTS):
        columns, rows = _found(name, module, inputs), _found(name, module, (output,))
        if columns and rows:
            holder = next(iter(columns)).rpartition(".")[0]
            inner = module.get_submodule(inputs[0].rpartition(".")[0])
            layers = Layers(holder, columns, rows)
            if depth == "gathered" or head_size_of_holder(inner) is None:
                yield gathered(layers, ranks)
                return
            yield split_attention(layers, inner, ranks, say, numbers=True)
            yield from _head_biases(holder, inner, ranks)
            return
    for fused, output in product(TOGETHER, OUTPUTS):
        columns, rows = _found(name, module, (fused,)), _found(name, module, (output,))
        if columns and rows:
            if depth == "heads" and is_conv1d(*columns.values()):
                yield from _three_in_one(Layers(name, columns, rows), module, ranks)
            else:
                yield gathered(Layers(name, columns, rows), ranks)
            return


def _three_in_one(layers: Layers, module: nn.Module, ranks: int) -> Iterator[Entries]:
    """GPT-2's: three weights beside each other, parted by a number in an attribute."""
    size, parted = head_size_of_holder(module), getattr(module, "split_size", None)
    (column, linear), (row, _) = *layers.columns.items(), *layers.rows.items()
    width = oriented_shape(linear)[0]
    if size and type(parted) is int and parted * 3 == width and parted % (size * ranks) == 0:
        yield {
            column: [Split("column", unit=size, stacked=3)],
            row: [Split("row", unit=size)],
            layers.holder: [Divided("split_size")],
        }


def _head_biases(holder: str, module: nn.Module, ranks: int) -> Iterator[Entries]:
    for short in HEAD_BIASES:
        table = module._modules.get(short)
        if isinstance(table, nn.Embedding) and table.embedding_dim % ranks == 0:
            yield {f"{holder}.{short}": [Split("column")]}


def _mlp(name: str, module: nn.Module, ranks: int, say: Say) -> Iterator[Entries]:
    for narrow, choices in NARROWS.items():
        for wide in choices:
            columns, rows = _found(name, module, wide), _found(name, module, (narrow,))
            if not columns or not rows:
                continue
            outs = {oriented_shape(column)[0] for column in columns.values()}
            (width,) = (oriented_shape(row)[1] for row in rows.values())
            if outs == {width}:
                yield split_evenly(Layers(name, columns, rows), ranks, say)
            elif outs == {2 * width}:
                yield split_evenly(Layers(name, columns, rows), ranks, say, stacked=2)
            return


def _found(name: str, module: nn.Module, shorts: tuple[str, ...]) -> dict[str, nn.Module]:
    """The layers of these names, or none, if one is missing or is no linear layer."""
    found = {}
    for short in shorts:
        try:
            layer = module.get_submodule(short)
        except AttributeError:
            return {}
        if type(layer) is not nn.Linear and not is_conv1d(layer):
            return {}
        found[f"{name}.{short}" if name else short] = layer
    return found
