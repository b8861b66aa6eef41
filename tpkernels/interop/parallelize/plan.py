"""Plans to split a model: patterns of module names, and how matching modules are split.

    column       nn.Linear whose output features are split; the next module gets this rank's features
    row          nn.Linear whose input features are split already; its output has all features
    row_of_full  the same, called with all features, and takes this rank's
    head         nn.Linear whose output features are split and gathered: any number of them
    embedding    nn.Embedding whose rows are split: any number of them
    partial      any module that is kept and works on this rank's features: gradients are summed over ranks
    replicated   any module that is kept and works on full features, wherever it stands

The entries below have options. Patterns are those of `fnmatch`: * matches anything, dots too. A head of
attention is never split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from tpkernels.groups.sizes import split_heads
from tpkernels.interop.parallelize.lora import split_with

SplitKind = Literal["column", "row", "row_of_full", "head", "embedding"]
SPLIT_KINDS = ("column", "row", "row_of_full", "head", "embedding")
KEPT = ("partial", "replicated")


@dataclass(frozen=True)
class Split:
    """An entry that splits a module, by kind. A column may be an nn.Embedding: its features are split.

    unit: features that stay on one rank, such as those of an attention head
    stacked: how many equal weights are concatenated in this one, or the size of each; each of them is split;
        column only
    padded: pad units with zeros if ranks do not divide them; the number of runs of units, each split over
        ranks of its own; 0: ranks divide the units; for an nn.Linear as column or row only: see `HeadSplit`
    """

    kind: SplitKind
    unit: int = 1
    stacked: int | tuple[int, ...] = 1
    padded: int = 0


@dataclass(frozen=True)
class SharedHeads:
    """An entry for an nn.Linear of keys or values with heads that ranks do not divide, such as one head.

    Each rank keeps the full weight, and computes the heads that its queries read: see `heads_read`.

    unit: features of a head
    queries: number of query heads; they are padded if ranks do not divide them
    """

    unit: int
    queries: int


@dataclass(frozen=True, init=False)
class Divided:
    """An entry that keeps a module, and divides numbers of features or heads in its attributes by the ranks.

    For an attribute such as "config.num_heads" the module gets a copy of its config with the new number.
    """

    attributes: tuple[str, ...]

    def __init__(self, *attributes: str) -> None:
        object.__setattr__(self, "attributes", attributes)


@dataclass(frozen=True)
class Number:
    """An entry that keeps a module, and sets a number in one of its attributes."""

    attribute: str
    value: int


@dataclass(frozen=True)
class Parameters:
    """An entry that keeps a module, and splits its own parameters.

    split: of each parameter the name, the dimension to split, and the number of weights concatenated along it
    summed: the module takes full features, and ranks sum its outputs, as in a mixture of experts; a bias that
        is not split is added once; False: the module works on this rank's features
    """

    split: tuple[tuple[str, int, int], ...]
    summed: bool


@dataclass(frozen=True)
class Tail:
    """An entry that keeps a module on full features whose last output features go to this rank's heads.

    Such as positions of keys in latent attention. The gradients of these features are summed over ranks.
    """

    features: int


@dataclass(frozen=True)
class Shared:
    """An entry that keeps a module inside a summed module, and divides its output by the number of ranks."""


@dataclass(frozen=True)
class Kept:
    """An entry that keeps a module's full parameters on every rank: "partial" or "replicated".

    partial: each rank sees its own features only, so its gradient is partial
    """

    partial: bool


PlanEntry = Split | SharedHeads | Divided | Number | Parameters | Tail | Shared | Kept
# A module may have several of these entries.
MAY_SHARE_A_MODULE = (Divided, Number, Parameters, Tail)
ParallelizePlan = Mapping[
    str, SplitKind | Literal["partial", "replicated"] | PlanEntry | tuple[PlanEntry, ...]
]


@dataclass(frozen=True)
class Match:
    """A module that a pattern of the plan fits, and one entry for it."""

    name: str
    module: nn.Module
    entry: PlanEntry


def matches(model: nn.Module, plan: ParallelizePlan) -> list[Match]:
    """Return the plan's entries for each module; raise for a pattern without module, or a module with two."""
    if not plan:
        raise ValueError("plan: expected at least one pattern, got none")
    named = dict(model.named_modules(remove_duplicate=False))
    named.pop("", None)
    found: list[Match] = []
    taken: dict[nn.Module, tuple[str, bool]] = {}
    for pattern, said in plan.items():
        entries = [_entry(pattern, each) for each in (said if isinstance(said, tuple) else (said,))]
        beside = all(isinstance(entry, MAY_SHARE_A_MODULE) for entry in entries)
        fitting = [pattern] if pattern in named else [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"plan: {pattern!r} fits no module; there are {_some(list(named))}")
        first = entries[0]
        kind = first.kind if isinstance(first, Split) else "column" * isinstance(first, SharedHeads)
        for name, module in (place for each in fitting for place in split_with(each, named[each], kind)):
            if module not in taken:
                found += [Match(name, module, entry) for entry in entries]
            other, both = taken.setdefault(module, (pattern, beside))
            if other == pattern:
                continue
            if not (both and beside):
                raise ValueError(f"plan: '{name}' fits both {other!r} and {pattern!r}; make one narrower")
            found += [Match(name, module, entry) for entry in entries]
    return found


def heads_read(rank: int, *, heads: int, queries: int, ranks: int) -> tuple[int, ...]:
    """Return the heads of keys and values that a rank's queries read, in order; equally many on every rank.

    Each head once if equally many of the rank's queries read it, else one for each query. Padding reads any.

    >>> heads_read(1, heads=2, queries=8, ranks=4)
    (0,)
    >>> heads_read(0, heads=3, queries=12, ranks=2)
    (0, 0, 0, 0, 1, 1)
    >>> [heads_read(rank, heads=2, queries=6, ranks=4) for rank in range(4)]
    [(0,), (0,), (1,), (1,)]
    """
    split, group = split_heads(queries, ranks=ranks, kv_heads=heads), queries // heads
    if split.runs > 1:
        return (rank * heads // ranks,)
    first, slots = split.heads_of(rank).start, split.slots
    read = [min(query // group, heads - 1) for query in range(first, first + slots)]
    # a rank's queries lie in one group, or are complete groups
    step = slots if group % slots == 0 else group if slots % group == 0 else 1
    return tuple(read[::step])


def llama_plan(config: Any) -> ParallelizePlan:
    """Return the plan for a `LlamaForCausalLM`; without "lm_head", for a `LlamaModel`.

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


def gpt2_plan(config: Any) -> ParallelizePlan:
    """Return the plan for a `GPT2LMHeadModel`; without "lm_head", for a `GPT2Model`.

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


def _entry(pattern: str, said: object) -> PlanEntry:
    if isinstance(said, str):
        said = Kept(said == "partial") if said in KEPT else Split(said)  # type: ignore[arg-type]
    if isinstance(said, SharedHeads | Divided | Number | Parameters | Tail | Shared | Kept):
        return said
    if not isinstance(said, Split) or said.kind not in SPLIT_KINDS:
        raise ValueError(
            f"plan: {pattern!r}: expected one of {', '.join((*SPLIT_KINDS, *KEPT))}, got {said!r}"
        )
    stacks = said.stacked if isinstance(said.stacked, tuple) else (said.stacked,)
    fits = said.stacked == 1 or (said.kind == "column" and not said.padded)
    if said.unit < 1 or not stacks or min(stacks) < 1 or not fits or said.padded < 0:
        raise ValueError(
            f"plan: {pattern!r}: expected a positive unit, and stacked > 1 for a column only, not padded, "
            f"got {said}"
        )
    return said


def listed(first: str, *items: str) -> str:
    """Return the text of a refusal: a first sentence, and a line for each item."""
    return "\n  - ".join([first, *filter(None, items)])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown
