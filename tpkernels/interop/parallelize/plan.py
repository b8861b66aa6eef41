"""Plans of how a model is split: patterns of module names, and what becomes of the modules that match.

    column      nn.Linear whose output features are split; the next module gets this rank's features
    row         nn.Linear whose input features are split already; its output has all features
    head        nn.Linear whose output features are split and gathered: any number of them
    embedding   nn.Embedding whose rows are split: any number of them
    partial     any module that is kept and works on this rank's features: gradients are summed over ranks
    replicated  any module that is kept and works on full features, wherever it stands

Patterns are those of `fnmatch`: * matches anything, dots too. `llama_plan` and `gpt2_plan` are for models of
`transformers`. Their attention infers the number of heads, `view(..., -1, head_dim)`, so that each rank
works on its own heads. A head is never split: the number of heads of keys and values must be a multiple of
the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from tpkernels.interop.parallelize.lora import split_with

Kind = Literal["column", "row", "head", "embedding"]
KINDS = ("column", "row", "head", "embedding")
KEPT = ("partial", "replicated")


@dataclass(frozen=True)
class Split:
    """One of the kinds, in detail.

    unit: features that stay on one rank, such as those of an attention head
    stacked: how many weights are concatenated in this one; each of them is split; column only
    """

    kind: Kind
    unit: int = 1
    stacked: int = 1


@dataclass(frozen=True)
class Divided:
    """A module that is kept, with a number of features or heads in an attribute that ranks divide."""

    attribute: str


@dataclass(frozen=True)
class Kept:
    """A module whose parameters every rank keeps: "partial" or "replicated".

    partial: each rank sees its own features only, so that its gradient is one term of a sum
    """

    partial: bool


Plan = Mapping[str, Kind | Literal["partial", "replicated"] | Split | Divided | Kept]


@dataclass(frozen=True)
class Match:
    name: str
    module: nn.Module
    entry: Split | Divided | Kept


def matches(model: nn.Module, plan: Plan) -> list[Match]:
    """The plan's entry for each module; an error names a pattern without module, or a module with two."""
    if not plan:
        raise ValueError("plan: expected at least one pattern, got none")
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    found: dict[nn.Module, tuple[str, Match]] = {}
    for pattern, said in plan.items():
        entry = _entry(pattern, said)
        fitting = [(name, module) for name, module in named if fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(
                f"plan: {pattern!r} fits no module; there are {_some([name for name, _ in named])}"
            )
        kind = entry.kind if isinstance(entry, Split) else ""
        for name, module in (place for each in fitting for place in split_with(*each, kind)):
            other, _ = found.setdefault(module, (pattern, Match(name, module, entry)))
            if other != pattern:
                raise ValueError(f"plan: '{name}' fits both {other!r} and {pattern!r}; make one narrower")
    return [match for _, match in found.values()]


def llama_plan(config: Any) -> Plan:
    """For a `LlamaForCausalLM`; without "lm_head", for a `LlamaModel`.

    config: its LlamaConfig
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "*embed_tokens": "embedding",
        "*.self_attn.[qkv]_proj": Split("column", unit=head),
        "*.self_attn.o_proj": Split("row", unit=head),
        "*.mlp.gate_proj": "column",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row",
        "lm_head": "head",
    }


def gpt2_plan(config: Any) -> Plan:
    """For a `GPT2LMHeadModel`; without "lm_head", for a `GPT2Model`.

    config: its GPT2Config
    """
    head = config.n_embd // config.n_head
    return {
        "*wte": "embedding",
        "*.attn": Divided("split_size"),
        "*.attn.c_attn": Split("column", unit=head, stacked=3),
        "*.attn.c_proj": Split("row", unit=head),
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
        "lm_head": "head",
    }


def _entry(pattern: str, said: object) -> Split | Divided | Kept:
    if isinstance(said, str):
        said = Kept(said == "partial") if said in KEPT else Split(said)  # type: ignore[arg-type]
    if isinstance(said, Divided | Kept):
        return said
    if not isinstance(said, Split) or said.kind not in KINDS:
        raise ValueError(f"plan: {pattern!r}: expected one of {', '.join((*KINDS, *KEPT))}, got {said!r}")
    if said.unit < 1 or said.stacked < 1 or (said.stacked > 1 and said.kind != "column"):
        raise ValueError(
            f"plan: {pattern!r}: expected a positive unit, and stacked > 1 for a column only, got {said}"
        )
    return said


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown
