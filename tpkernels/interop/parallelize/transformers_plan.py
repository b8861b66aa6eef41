"""Translates the own plan of a model of `transformers` into ours.

Its `_tp_plan` names a style for patterns of modules and parameters, in which * is one part of a name:

    style                                                 becomes
    colwise                                               column
    colwise_gather_output, colwise_rep                    head
    rowwise                                               row
    rowwise_split_input, rowwise_rep                      row_of_full
    packed_colwise, packed_rowwise                        column or row of two stacked weights
    embedding_rowwise, embedding_colwise                  embedding
    replicate, sequence_parallel                          replicated
    replicated_with_grad_allreduce                        partial
    mla_kv_a_proj                                         Tail
    moe_tp_experts, all_reduce                            Parameters of the module, summed over ranks
    local_params                                          Parameters of the module, on this rank's features
    moe_identity_expert                                   Shared

A style of a parameter, such as one of stacked experts, gives the dimension to split. A pattern that fits
nothing, such as layers that this config lacks, is ignored, as in `transformers`.

Styles that a caller gives, alone or in a `DistributedConfig`, override those of the model's own plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from torch import nn

from tpkernels.interop.parallelize.entries import (
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
from tpkernels.interop.parallelize.plan import Kept, ParallelizePlan, PlanEntry, Shared, Split, Tail

LINEAR_STYLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
GATHERED_STYLES = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")
TABLE_STYLES = ("embedding_rowwise", "embedding_colwise")
KEPT_STYLES = {"replicate": False, "sequence_parallel": False, "replicated_with_grad_allreduce": True}
SUMMED_STYLES = ("moe_tp_experts", "all_reduce")
TAIL_STYLE, SHARED_STYLE = "mla_kv_a_proj", "moe_identity_expert"
STYLES = {*LINEAR_STYLES, *GATHERED_STYLES, *TABLE_STYLES, *KEPT_STYLES, *SUMMED_STYLES}
STYLES |= {"local_params", TAIL_STYLE, SHARED_STYLE}


# Fields of a DistributedConfig that ask for more than tensor parallelism, and advice.
_MORE = {
    "pp_size": "pipeline stages are not made of a model that parallelize splits",
    "fsdp_size": "apply fully_shard to the split model: docs/fsdp.md",
    "dp_replicate_size": "apply fully_shard or DDP to the split model: docs/fsdp.md",
    "ep_size": "every rank has a shard of each expert",
    "enable_expert_parallel": "every rank has a shard of each expert",
    "enable_sequence_parallel": "pass sequence_parallel=True to parallelize",
}


class DistributedConfig(Protocol):
    """A `transformers.distributed.DistributedConfig`."""

    @property
    def tp_size(self) -> int | None: ...

    @property
    def tp_plan(self) -> Mapping[str, str] | Literal["auto"] | None: ...


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the model's own plan, in `transformers`' styles; empty if it has none."""
    return dict(getattr(model, "_tp_plan", None) or {})


def requested_plan(model: nn.Module, plan: Any, ranks: int, say: Say) -> ParallelizePlan | None:
    """Return the plan that the caller or the model's config gives, in our entries; None: none, or "auto".

    plan: as `parallelize` gets it
    """
    if getattr(model, "_is_distributed_loading_by_transformers", False):
        raise ValueError(
            "parallelize: expected a model that is not split, got one that transformers has split; call "
            "from_pretrained without distributed_config, or build the model under torch.device('meta') and "
            "pass checkpoint=folder to parallelize"
        )
    if plan is None:
        plan = getattr(getattr(model, "config", None), "distributed_config", None)
        plan = SimpleNamespace(**plan) if isinstance(plan, Mapping) else plan
    if hasattr(plan, "tp_size"):
        plan = _tp_plan(plan, ranks)
    if plan is None or plan == "auto":
        return None
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan: expected a plan, 'auto', a DistributedConfig or None, got {plan!r}")
    if STYLES.isdisjoint(style for style in plan.values() if isinstance(style, str)):
        return plan
    own = styles_of(model)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for pattern in plan.keys() - own.keys():
        if not any(map(_fits(pattern), names)):
            raise ValueError(
                f"plan: {pattern!r}, a pattern of transformers' styles, fits no module or parameter"
            )
    return own_plan(model, ranks, say, own | dict(plan))


def _tp_plan(config: Any, ranks: int) -> Mapping[str, str] | str | None:
    """Return the plan of a DistributedConfig; raise if it asks for more than `ranks` tensor ranks."""
    if config.tp_size != ranks:
        raise ValueError(
            f"DistributedConfig: expected tp_size={ranks}, the size of the tensor-parallel group, got "
            f"{config.tp_size}; pass the same size to initialize_model_parallel"
        )
    for name, advice in _MORE.items():
        value = getattr(config, name, None) or 0  # older versions lack some
        if value > name.endswith("_size"):
            raise ValueError(f"DistributedConfig: {name}={value!r} is not what parallelize does: {advice}")
    plan: Mapping[str, str] | str | None = getattr(config, "tp_plan", None)
    if plan is not None and not plan:
        raise ValueError(
            "DistributedConfig: tp_plan={} splits nothing; leave it out for the model's own plan"
        )
    return plan


def _fits(pattern: str) -> Callable[[str], object]:
    """Return a function that is true for names that a pattern of `transformers` fits."""
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch


def own_plan(
    model: nn.Module, ranks: int, say: Say, styles: Mapping[str, str] | None = None
) -> ParallelizePlan:
    """Return the model's own plan for a number of ranks, in our entries.

    say: called with what is not split
    styles: in place of the model's own
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    named: dict[str, str] = {}
    of_parameters: dict[str, dict[str, str]] = {}
    for pattern, style in (styles_of(model) if styles is None else styles).items():
        if style not in STYLES:
            raise ValueError(
                f"the model's own plan: {pattern!r}: expected a style among {', '.join(sorted(STYLES))}, got "
                f"{style!r}; pass a plan"
            )
        fits = _fits(pattern)
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
        if style in LINEAR_STYLES + GATHERED_STYLES:
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
            packed = any(named[name].startswith("packed") for name in plain.columns)
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
    return {
        name: [Split("embedding")]
        for name, style in named.items()
        if style in TABLE_STYLES + LINEAR_STYLES + GATHERED_STYLES and isinstance(modules[name], nn.Embedding)
    }


def _kept(model: nn.Module, modules: Mapping[str, nn.Module], named: Mapping[str, str]) -> Iterator[Entries]:
    config: Any = getattr(model, "config", None)
    for name, style in named.items():
        entry: PlanEntry
        if style in KEPT_STYLES:
            entry = Kept(partial=KEPT_STYLES[style])
        elif style == SHARED_STYLE:
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
        if style not in LINEAR_STYLES:
            raise ValueError(f"the model's own plan: '{name}.{short}': {style!r} is no style for a parameter")
        last = style.endswith("rowwise") or parameter.ndim == 1
        split.append((short, parameter.ndim - (1 if last else 2), 2 if style.startswith("packed") else 1))
    summed = of_module in SUMMED_STYLES or "rowwise" in styles.values()
    return split_parameters(name, module, split, summed, ranks, say)
