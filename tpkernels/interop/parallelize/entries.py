"""Makes entries of plans: for the layers of an attention, of an MLP, of experts, and for the vocabulary.

Layers are named from a module that holds them: `self_attn` has q_proj, k_proj, v_proj and o_proj.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from tpkernels.groups.sizes import HeadSplit, split_heads
from tpkernels.interop.parallelize.hf_modules import is_conv1d, is_linear, oriented_shape
from tpkernels.interop.parallelize.plan import (
    Divided,
    Number,
    Parameters,
    PlanEntry,
    SharedHeads,
    Split,
    heads_read,
)

Entries = dict[str, list[PlanEntry]]
Say = Callable[[str], None]

KEYS_AND_VALUES = {"k_proj", "v_proj", "key", "value", "k", "v", "k_lin", "v_lin", "key_proj", "value_proj"}
KEYS_AND_VALUES |= {"Wk", "Wv"}
# Attributes by which a module reshapes its layers' outputs: features of a head, numbers of heads, features of
# all heads.
HEAD_SIZES: tuple[str, ...] = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
HEAD_SIZES += ("kv_channels", "v_head_dim")
HEADS: tuple[str, ...] = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads")
HEADS += ("num_kv_heads", "all_head_size", "inner_dim")
FEATURES: tuple[str, ...] = ("embed_dim", "hidden_size", "dim", "d_model", "embed_size")
SHARED = ("num_key_value_heads", "num_kv_heads")
KV_GROUPS = "num_key_value_groups"
COUNTED_TOKENS = 2048  # length of the sequence for which an attention's FLOPs are counted


@dataclass(frozen=True)
class Layers:
    """Linear layers of a module, by their full names.

    holder: for an attention the module that folds features into heads; else the module with the layers
    """

    holder: str
    columns: dict[str, nn.Module]
    rows: dict[str, nn.Module]


def head_size_of_holder(holder: nn.Module) -> int | None:
    """Return the features of a head, from the holder's attributes; None without such an attribute."""
    for name in HEAD_SIZES:
        if type(size := getattr(holder, name, None)) is int:
            return size
    return None


def split_attention(
    layers: Layers, holder: nn.Module, ranks: int, say: Say, *, numbers: tuple[str, ...] = ()
) -> Entries:
    """Return entries that give each rank its own heads.

    If keys and values have fewer heads than ranks, several ranks compute the same head. Heads that ranks do
    not divide are padded with zeros, or all computed by every rank.
    numbers: attributes of the holder to divide, if it has them
    """
    row = next(iter(layers.rows.values()))
    features, size = oriented_shape(row)[1], head_size_of_holder(holder)
    queries = _queries(holder, features, size)
    if queries is None:
        return split_evenly(layers, ranks, say)
    heads: dict[str, int] = {}
    for name, column in layers.columns.items():
        width = oriented_shape(column)[0]
        short = name.rpartition(".")[2]
        own = features // queries if short.startswith("v") else size
        shared = short in KEYS_AND_VALUES and own is not None and width % own == 0
        heads[name] = width // own if shared and own is not None else queries
        if width % heads[name] or queries % heads[name]:
            return gathered(layers, ranks)
    split = split_heads(queries, ranks=ranks, kv_heads=min(heads.values(), default=queries))
    padded = split.runs if queries % ranks else 0
    if padded and not _padding_pays(layers, heads, holder, split, say):
        return gathered(layers, ranks)
    entries: Entries = {name: [Split("row", features // queries, padded=padded)] for name in layers.rows}
    for name, column in layers.columns.items():
        unit = oriented_shape(column)[0] // heads[name]
        in_groups = split.slots * heads[name] % queries == 0  # a rank's queries fill whole groups
        if in_groups or is_conv1d(column):
            entries[name] = [Split("column", unit, padded=padded)]
        else:
            entries[name] = [SharedHeads(unit, queries)]
    around = _numbers(entries, heads, holder, split, numbers)
    if around:
        entries[layers.holder] = around
    return entries


def _numbers(
    entries: Entries, heads: Mapping[str, int], holder: nn.Module, split: HeadSplit, names: tuple[str, ...]
) -> list[PlanEntry]:
    """Return entries for attributes of the holder with numbers of heads, or of their features."""
    here = min((_heads_computed(count, split) for count in heads.values()), default=split.slots)
    shared = any(isinstance(entry, SharedHeads) for each in entries.values() for entry in each)
    padded = split.heads % split.ranks > 0
    changed = {KV_GROUPS: split.slots // here} if shared else {}
    if shared or padded:
        changed |= {name: here for name in SHARED if name in names}
    others = [name for name in names if name not in changed and _is_number(holder, name)]
    if padded:
        counted = {name: divmod(getattr(holder, name), split.heads) for name in others}
        changed |= {name: each * split.slots for name, (each, rest) in counted.items() if not rest}
        others = []
    found: list[PlanEntry] = [Number(name, n) for name, n in changed.items() if _is_number(holder, name)]
    divided = [name for name in others if getattr(holder, name) % split.ranks == 0]
    return [*found, Divided(*divided)] if divided else found


def _heads_computed(heads: int, split: HeadSplit) -> int:
    """Return how many of `heads` each rank computes, counting padding and repeated heads."""
    return len(heads_read(0, heads=heads, queries=split.heads, ranks=split.ranks))


def _padding_pays(
    layers: Layers, heads: Mapping[str, int], holder: nn.Module, split: HeadSplit, say: Say
) -> bool:
    """Whether padded heads are possible, for fewer FLOPs than all heads on every rank; report to `say`."""
    slots = split.slots / split.heads
    products = [(layer, slots) for layer in layers.rows.values()]
    products += [
        (layer, _heads_computed(heads[name], split) / heads[name]) for name, layer in layers.columns.items()
    ]
    sizes = [prod(oriented_shape(layer)) for layer, _ in products]
    features = oriented_shape(next(iter(layers.rows.values())))[1]
    between = 2 * COUNTED_TOKENS * features  # queries times keys, and weights times values
    even = (sum(sizes) + between) / split.ranks
    computed = sum(size * fraction for size, (_, fraction) in zip(sizes, products, strict=True))
    padded, gathered = (computed + slots * between) / even, (sum(sizes) / split.ranks + between) / even
    fits = not any(map(is_conv1d, layers.columns.values())) and not _has_numbers_of_heads(holder)
    pays = fits and padded <= gathered
    how = f"each computes {split.slots}, zeros among them" if pays else "every rank computes all of them"
    say(
        f"'{layers.holder}': {split.ranks} ranks do not divide its number of heads, {split.heads}: {how}: "
        f"{padded if pays else gathered:.2f} times the FLOPs of an even split, at {COUNTED_TOKENS} tokens"
        + f", where all heads on every rank take {gathered:.2f} times"
        * pays
    )
    return pays


def _has_numbers_of_heads(holder: nn.Module) -> bool:
    """Whether it has parameters per head, such as sinks, or is called with biases per head."""
    biased = any(name.startswith("relative_attention") for name in vars(holder))
    tables = [child for child in holder.children() if isinstance(child, nn.Embedding)]
    return biased or any(True for module in (holder, *tables) for _ in module.parameters(recurse=False))


def split_evenly(layers: Layers, ranks: int, say: Say, *, stacked: int = 1) -> Entries:
    """Return entries that split features between columns and rows evenly, if ranks divide them."""
    sizes = [oriented_shape(each)[0] // stacked for each in layers.columns.values()]
    sizes += [oriented_shape(each)[1] for each in layers.rows.values()]
    if any(size % ranks for size in sizes):
        say(f"'{layers.holder}' has {min(sizes)} features: every rank computes all of them")
        return {}
    columns: Entries = {name: [Split("column", stacked=stacked)] for name in layers.columns}
    return columns | {name: [Split("row")] for name in layers.rows}


def gathered(layers: Layers, ranks: int) -> Entries:
    """Return entries that split weights, but let every rank compute all features between columns and rows."""
    entries: Entries = {
        name: [Split("head")] for name, column in layers.columns.items() if not is_conv1d(column)
    }
    for name, row in layers.rows.items():
        if oriented_shape(row)[1] % ranks == 0 and not is_conv1d(row):
            entries[name] = [Split("row_of_full")]
    return entries


def merged(parts: Iterable[Entries]) -> dict[str, PlanEntry | tuple[PlanEntry, ...]]:
    """Merge entries by full names into one plan."""
    found: Entries = {}
    for part in parts:
        for name, entries in part.items():
            found.setdefault(name, []).extend(entries)
    return {name: entries[0] if len(entries) == 1 else tuple(entries) for name, entries in found.items()}


def _queries(holder: nn.Module, features: int, size: int | None) -> int | None:
    """Return the number of heads whose features enter a row layer; None if unknown."""
    value_size = getattr(holder, "v_head_dim", None)  # of latent attention
    size = value_size if type(value_size) is int else size
    return features // size if size and features % size == 0 else None


def _is_number(holder: nn.Module, name: str) -> bool:
    return type(getattr(holder, name, None)) is int


def packed_attention(layers: Layers, holder: nn.Module, ranks: int) -> Entries | None:
    """Return entries for queries, keys and values in one weight, or None if their sizes are unknown.

    GPT-2's are equal, in a Conv1D; Phi-3 has fewer keys than queries, in an nn.Linear.
    """
    size = head_size_of_holder(holder)
    if len(layers.columns) != 1 or not size:
        return None
    ((name, column),) = layers.columns.items()
    if is_conv1d(column):
        numbers, sizes = Divided("split_size"), [getattr(holder, "split_size", None)] * 3
    else:
        numbers = Divided("config.num_attention_heads", "num_key_value_heads")
        queries = getattr(getattr(holder, "config", None), "num_attention_heads", None)
        keys = getattr(holder, "num_key_value_heads", None)
        sizes = [count * size if type(count) is int else None for count in (queries, keys, keys)]
    stacks = tuple(each for each in sizes if type(each) is int and each % (size * ranks) == 0)
    if len(stacks) != 3 or oriented_shape(column)[0] != sum(stacks):
        return None
    if any(oriented_shape(row)[1] != stacks[0] for row in layers.rows.values()):
        return None
    rows: Entries = {row: [Split("row", unit=size)] for row in layers.rows}
    return {name: [Split("column", unit=size, stacked=stacks)], layers.holder: [numbers], **rows}


def split_parameters(
    name: str, module: nn.Module, split: Sequence[tuple[str, int, int]], summed: bool, ranks: int, say: Say
) -> Entries:
    """Return an entry that splits parameters of a module; none, reported to `say`, if one is too narrow.

    split, summed: as in `Parameters`
    """
    narrow = next(filter(None, (_narrow(module, *each, ranks) for each in split)), None)
    if narrow:
        say(f"'{name}': {narrow}: every rank computes all of it")
        return {}
    return {name: [Parameters(tuple(split), summed)]}


def _narrow(module: nn.Module, short: str, dim: int, stacked: int, ranks: int) -> str:
    """Return why a weight is too narrow for this many ranks; "" if it is not."""
    weight = module._parameters[short]
    assert weight is not None
    size = weight.shape[dim]
    if size % (ranks * stacked):
        return f"'{short}' has {size // stacked} features"
    # torch's grouped products need rows of a multiple of 16 bytes
    row = weight.shape[-1] * weight.element_size()
    if weight.ndim == 3 and dim % 3 == 2 and row % 16 == 0 and row % (16 * ranks):
        return f"'{short}' has rows of {row} bytes, and a rank's shard of a row is no multiple of 16"
    return ""


Said = dict[str, PlanEntry | tuple[PlanEntry, ...]]


def with_vocabulary(model: nn.Module, plan: Said) -> Said:
    """Add entries for the input embeddings and the head of a model of `transformers` to a plan.

    Layers that share a parameter are split alike, whatever the plan says: all of them, or none if one cannot
    be split.
    """
    said = dict(plan)
    for table in tables(model):
        shared = _sharing(model, table)
        kinds = {name: _kind(module) for name, module in shared.items()}
        if len(shared) == 1 and not kinds.keys().isdisjoint(said):
            continue
        for name, kind in kinds.items():
            said.pop(name, None)
            if kind is not None and None not in kinds.values():
                said[name] = Split(kind)  # type: ignore[arg-type]
    return said


def tables(model: nn.Module) -> list[nn.Module]:
    """Return the input embeddings and the head that a model of `transformers` names."""
    found = [_called(model, "get_input_embeddings"), _called(model, "get_output_embeddings")]
    return [table for table in found if table is not None]


def _sharing(model: nn.Module, table: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that share a parameter with a table, directly or through other modules."""
    found = {id(parameter) for parameter in table._parameters.values() if parameter is not None}
    owners: dict[str, nn.Module] = {}
    grown = True
    while grown:
        grown = False
        for name, module in model.named_modules():
            own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
            if name not in owners and own & found:
                owners[name], grown = module, True
                found |= own
    return owners


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return "embedding" if plain else None
    return "head" if is_linear(module) else None


def _called(model: nn.Module, name: str) -> nn.Module | None:
    getter: Callable[[], Any] | None = getattr(model, name, None)
    if getter is None:
        return None
    try:
        found = getter()
    except (AttributeError, NotImplementedError):  # a model without words, such as one of images
        return None
    return found if isinstance(found, nn.Module) else None
