"""Chooses the plan that splits a model if the caller gives none.

The own plan of a model of `transformers` comes first, completed by names of layers; then plans by names of
layers, from the plan that splits most to the plan that splits least. The first plan that passes its trial is
taken, and a warning says why earlier plans failed. A plan by names must be compared with the unsharded model,
except for models in docs/models-supported.md, which were compared before.

Plans by names of layers, for models without a plan of their own.

An attention is a module with linear layers for queries, keys and values, or one layer for all three, and an
output layer. An MLP has one or two layers that widen and one layer that narrows. Nothing else is split. Names
do not say how a module uses its features: such a plan must be compared with the unsharded model.

Translates the own plan of a model of `transformers` into ours.

Its `_tp_plan` names a style for patterns of modules and parameters, in which * is one part of a name:

    style                                                 becomes
    colwise, local_colwise                                column
    colwise_gather_output, colwise_rep                    head
    rowwise, local_rowwise                                row
    rowwise_split_input, rowwise_rep                      row_of_full
    packed_colwise                                        column of two stacked weights
    embedding_rowwise, embedding_colwise                  embedding
    replicate, sequence_parallel                          replicated
    replicated_with_grad_allreduce                        partial
    mla_kv_a_proj                                         Tail
    moe_tp_experts, all_reduce, gather, local             Parameters of the module, summed over ranks
    local_params                                          Parameters of the module, on this rank's features
    moe_identity_expert                                   Shared

A style of a parameter, such as one of stacked experts, gives the dimension to split. A pattern that fits
nothing, such as layers that this config lacks, is ignored, as in `transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from textwrap import shorten
from typing import Any, Literal

from torch import nn

from tpkernels.errors import warn
from tpkernels.interop.parallelize.changes import planned
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
from tpkernels.interop.parallelize.plan import (
    Divided,
    Kept,
    ParallelizePlan,
    Parameters,
    PlanEntry,
    Shared,
    Split,
    Tail,
)
from tpkernels.interop.parallelize.probe import ParameterNames
from tpkernels.interop.parallelize.saving import require_dtensors
from tpkernels.interop.parallelize.trial import NotCompared, PlanTrial

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
            if numbers is not None and is_conv1d(*columns.values()):
                yield from _three_in_one(layers, module, ranks)
            elif numbers is not None and (packed := packed_attention(layers, module, ranks)):
                yield packed
            else:
                yield gathered(layers, ranks)
            return


def _three_in_one(layers: Layers, module: nn.Module, ranks: int) -> Iterator[Entries]:
    """Yield entries for GPT-2's attention: three weights in one, split by a number in an attribute."""
    size, parted = head_size_of_holder(module), getattr(module, "split_size", None)
    (column, linear), (row, _) = *layers.columns.items(), *layers.rows.items()
    width = oriented_shape(linear)[0]
    if size and type(parted) is int and parted * 3 == width and parted % (size * ranks) == 0:
        yield {
            column: [Split("column", unit=size, stacked=3)],
            row: [Split("row", unit=size)],
            layers.holder: [Divided("split_size")],
        }


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


COLUMN_STYLES = ("colwise", "local_colwise")
ROW_STYLES = ("rowwise", "local_rowwise")
GATHERED_STYLES = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")
PACKED_STYLES = {
    "packed_colwise": -2,
    "local_packed_colwise": -2,
    "packed_rowwise": -1,
    "local_packed_rowwise": -1,
}
TABLE_STYLES = ("embedding_rowwise", "embedding_colwise")
KEPT_STYLES = {"replicate": False, "sequence_parallel": False, "replicated_with_grad_allreduce": True}
TAIL_STYLE = "mla_kv_a_proj"
SUMMED_STYLES = ("moe_tp_experts", "all_reduce", "gather", "local")
STYLES = {
    *COLUMN_STYLES,
    *ROW_STYLES,
    *GATHERED_STYLES,
    *PACKED_STYLES,
    *TABLE_STYLES,
    *KEPT_STYLES,
    *SUMMED_STYLES,
}
STYLES |= {"local_params", TAIL_STYLE, "moe_identity_expert"}


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the model's own plan, in `transformers`' styles; empty if it has none."""
    return dict(getattr(model, "_tp_plan", None) or {})


def own_plan(model: nn.Module, ranks: int, say: Say) -> ParallelizePlan:
    """Return the model's own plan for a number of ranks, in our entries.

    say: called with what is not split
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    named: dict[str, str] = {}
    of_parameters: dict[str, dict[str, str]] = {}
    for pattern, style in styles_of(model).items():
        if style not in STYLES:
            raise ValueError(
                f"the model's own plan: {pattern!r}: expected a style among {', '.join(sorted(STYLES))}, got "
                f"{style!r}; pass a plan"
            )
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch
        for name in parameters:
            if fits(name):
                owner, _, short = name.rpartition(".")
                of_parameters.setdefault(owner, {})[short] = style
        named |= {name: style for name in modules if name and fits(name)}
    parts = [*_linear(modules, named, ranks, say), _tables(modules, named), *_kept(model, modules, named)]
    parts += [
        _parameters(name, modules[name], styles, named.get(name), ranks, say)
        for name, styles in of_parameters.items()
    ]
    plan = merged(parts)
    for name, style in named.items():  # unsplit layers have full features and all heads
        beside = name.rpartition(".")[0]
        if (KEPT_STYLES.get(style) or style == TAIL_STYLE) and not any(
            isinstance(entry, Split) and entry.kind == "row" and each.rpartition(".")[0] == beside
            for each, entry in plan.items()
        ):
            plan.pop(name)
    return with_vocabulary(model, plan)


def _linear(
    modules: Mapping[str, nn.Module], named: Mapping[str, str], ranks: int, say: Say
) -> Iterator[Entries]:
    """Yield entries for linear layers, grouped by the module that holds them."""
    holders: dict[str, Layers] = {}
    for name, style in named.items():
        if isinstance(modules[name], nn.Embedding):
            continue
        if style in (*COLUMN_STYLES, *ROW_STYLES, *GATHERED_STYLES, *PACKED_STYLES):
            holder = _holder(modules, name)
            layers = holders.setdefault(holder, Layers(holder, {}, {}))
            split = layers.rows if "rowwise" in style else layers.columns
            split[name] = getattr(modules[name], "base_layer", modules[name])  # inside an adapter
    for holder, layers in holders.items():
        if layers.rows and {name.rpartition(".")[2] for name in layers.columns} == {"gate_up_proj"}:
            yield split_evenly(layers, ranks, say, stacked=2)  # two weights in one, which only we split
            continue
        full = _of(layers, named, lambda style: style in GATHERED_STYLES)
        plain = _of(layers, named, lambda style: style not in GATHERED_STYLES)
        if not plain.columns and not plain.rows:
            yield packed_attention(full, modules[holder], ranks) or gathered(full, ranks)
            continue
        yield gathered(full, ranks)
        if plain.rows and head_size_of_holder(modules[holder]):
            yield split_attention(plain, modules[holder], ranks, say)
        else:
            packed = any(named[name] in PACKED_STYLES for name in plain.columns)
            yield split_evenly(plain, ranks, say, stacked=2 if packed else 1)


def _of(layers: Layers, named: Mapping[str, str], fits: Callable[[str], bool]) -> Layers:
    """Return the layers whose style fits."""
    columns = {name: layer for name, layer in layers.columns.items() if fits(named[name])}
    rows = {name: layer for name, layer in layers.rows.items() if fits(named[name])}
    return Layers(layers.holder, columns, rows)


def _holder(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return the module that holds a linear layer, skipping a module that only wraps it."""
    holder = name.rpartition(".")[0]
    wraps = sum(1 for _ in modules[holder].children()) == 1 and "." in holder
    return holder.rpartition(".")[0] if wraps else holder


def _tables(modules: Mapping[str, nn.Module], named: Mapping[str, str]) -> Entries:
    split = (*TABLE_STYLES, *COLUMN_STYLES, *ROW_STYLES, *GATHERED_STYLES)
    return {
        name: [Split("embedding")]
        for name, style in named.items()
        if style in split and isinstance(modules[name], nn.Embedding)
    }


def _kept(model: nn.Module, modules: Mapping[str, nn.Module], named: Mapping[str, str]) -> Iterator[Entries]:
    config: Any = getattr(model, "config", None)
    for name, style in named.items():
        entry: PlanEntry
        if style in KEPT_STYLES:
            entry = Kept(partial=KEPT_STYLES[style])
        elif style == "moe_identity_expert":
            entry = Shared()
        elif style == TAIL_STYLE:
            entry = Tail(config.get_text_config().qk_rope_head_dim)
        else:
            continue
        if any(True for _ in modules[name].parameters()) or not isinstance(entry, Kept):
            yield {name: [entry]}


def _parameters(
    name: str, module: nn.Module, styles: Mapping[str, str], of_module: str | None, ranks: int, say: Say
) -> Entries:
    """Return the entry for split parameters of a kept module."""
    split = []
    for short, style in styles.items():
        parameter = module._parameters[short]
        assert parameter is not None
        stacked = 2 if style in PACKED_STYLES else 1
        dim = PACKED_STYLES.get(style, -1 if style in ROW_STYLES or parameter.ndim == 1 else -2)
        if style not in (*COLUMN_STYLES, *ROW_STYLES, *PACKED_STYLES):
            raise ValueError(f"the model's own plan: '{name}.{short}': {style!r} is no style for a parameter")
        split.append((short, dim % parameter.ndim, stacked))
    summed = of_module in SUMMED_STYLES or any(style in ROW_STYLES for style in styles.values())
    return split_parameters(name, module, split, summed, ranks, say)


DEPTHS: tuple[Depth, ...] = ("heads", "heads and features", "gathered attention", "gathered", "mlp")
BROUGHT = "the plan that the model brings"
# Types of models of `transformers` whose plans by names were compared with the unsharded model.
# fmt: off
KNOWN = {
    "bart", "bert", "bloom", "camembert", "codegen", "distilbert", "electra", "falcon", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_oss", "gptj", "granitemoe", "granitemoeshared", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "lfm2", "lfm2_moe", "mbart", "mpt", "opt", "persimmon", "phimoe", "qwen2_moe",
    "roberta", "t5", "umt5", "vit", "whisper", "xlm-roberta",
}
# fmt: on


@dataclass(frozen=True)
class PossiblePlan:
    """A plan that can be tried.

    certain: it need not be compared with the unsharded model
    whole: the layers that it leaves unsplit on every rank, in words
    """

    name: str
    plan: ParallelizePlan
    certain: bool = True
    whole: list[str] = field(default_factory=list)


def possible_plans(model: nn.Module, ranks: int) -> list[PossiblePlan]:
    """Return the plans to try, in order; raise if there is none."""
    found: list[PossiblePlan] = []
    config: Any = getattr(model, "config", None)
    known = getattr(config, "model_type", None) in KNOWN
    if styles_of(model):
        whole: list[str] = []
        brought = own_plan(model, ranks, whole.append)
        more: list[str] = []
        completed = plan_by_names(model, ranks, "heads", more.append, brought)
        if completed != brought:
            found.append(PossiblePlan(f"{BROUGHT}, and names of layers", completed, known, whole + more))
        if brought:
            found.append(PossiblePlan(BROUGHT, brought, True, whole))
    for depth in DEPTHS:
        whole = []
        plan = plan_by_names(model, ranks, depth, whole.append)
        if plan and all(plan != other.plan for other in found):
            certain = known and depth == DEPTHS[0]
            found.append(PossiblePlan(f"a plan by names of layers ({depth})", plan, certain, whole))
    if not found:
        raise ValueError(
            "plan: expected one, for the model brings none and none of its layers is known by name; see "
            "docs/huggingface.md"
        )
    return found


def first_that_works(
    trial: PlanTrial, possible: list[PossiblePlan], *, as_dtensor: bool
) -> tuple[ParallelizePlan, ParameterNames]:
    """Try the plans in turn; return the first that passes, and the parameters with partial gradients."""
    example = trial.example()
    failed: list[tuple[PossiblePlan, Exception]] = []
    for one in possible:
        try:
            planned(trial.model, one.plan, trial.world)  # the same error on all ranks
            if as_dtensor:
                require_dtensors(one.plan)  # so is this
            partial = trial.plan(one.plan, example, certain=one.certain)
        except (ValueError, TypeError) as error:
            failed.append((one, error))
            continue
        if trial.world.rank == 0:
            _tell(one, failed)
        return one.plan, partial
    raise _refusal(trial.model, failed)


def _refusal(model: nn.Module, failed: list[tuple[PossiblePlan, Exception]]) -> Exception:
    """Return the error that no plan works, with advice and the reason for each plan."""
    for _, error in failed:
        if len(failed) == 1 or isinstance(error, NotCompared):
            return error
    details = "; ".join(f"{one.name}: {shorten(str(error), 400)}" for one, error in failed)
    return ValueError(
        f"plan: none of the {len(failed)} that were tried splits {type(model).__name__} correctly. Pass a "
        f"plan (docs/huggingface.md says how); the model is unchanged. {details}"
    )


def _tell(one: PossiblePlan, failed: list[tuple[PossiblePlan, Exception]]) -> None:
    for other, error in failed:
        warn(f"parallelize: {other.name} does not work: {error}. {one.name} does", stacklevel=4)
    if one.whole:
        more = f"; and {len(one.whole) - 1} more like it" if len(one.whole) > 1 else ""
        warn(f"parallelize: {one.name}: {one.whole[0]}{more}", stacklevel=4)
