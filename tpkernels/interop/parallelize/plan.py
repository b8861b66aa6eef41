"""Plans of how a model is split: patterns of module names, and what becomes of the modules that match.

    column       nn.Linear whose output features are split; the next module gets this rank's features
    row          nn.Linear whose input features are split already; its output has all features
    row_of_full  the same, called with all features, of which it takes this rank's
    head         nn.Linear whose output features are split and gathered: any number of them
    embedding    nn.Embedding whose rows are split: any number of them
    partial      any module that is kept and works on this rank's features: gradients are summed over ranks
    replicated   any module that is kept and works on full features, wherever it stands

The entries below say more. Patterns are those of `fnmatch`: * matches anything, dots too. A head of attention
is never split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from tpkernels.interop.parallelize.lora import split_with
from tpkernels.topology.shard import split_heads

SplitKind = Literal["column", "row", "row_of_full", "head", "embedding"]
SPLIT_KINDS = ("column", "row", "row_of_full", "head", "embedding")
KEPT = ("partial", "replicated")


@dataclass(frozen=True)
class Split:
    """One of the kinds, in detail. A column may be an nn.Embedding: its features are split.

    unit: features that stay on one rank, such as those of an attention head
    stacked: how many weights of one size are concatenated in this one, or the size of each; each of them is
        split; column only
    padded: units that ranks do not divide are padded with zeros: those of each of so many runs, over ranks of
        their own; 0: ranks divide them; an nn.Linear that is a column or a row only: see `HeadSplit`
    """

    kind: SplitKind
    unit: int = 1
    stacked: int | tuple[int, ...] = 1
    padded: int = 0


@dataclass(frozen=True)
class SharedHeads:
    """An nn.Linear of keys or values with heads that ranks do not divide, such as one head.

    Each rank keeps all of it, and computes the heads that its queries read: see `heads_read`.

    unit: features of a head
    queries: number of query heads, which are padded if ranks do not divide them
    """

    unit: int
    queries: int


@dataclass(frozen=True, init=False)
class Divided:
    """A module that is kept, with numbers of features or heads in attributes that ranks divide.

    In an attribute such as "config.num_heads" it is a number of the config; the module gets a copy of that.
    """

    attributes: tuple[str, ...]

    def __init__(self, *attributes: str) -> None:
        object.__setattr__(self, "attributes", attributes)


@dataclass(frozen=True)
class Number:
    """A module that is kept, with a number in an attribute that is another one on each rank."""

    attribute: str
    value: int


@dataclass(frozen=True)
class Parameters:
    """A module that is kept, with parameters of its own that are split.

    split: for each of them the dimension that is split, and how many weights are concatenated along it
    summed: it takes full features, and ranks add what they compute, as in a mixture of experts, where a bias
        that is not split is added once; False: it works on this rank's features
    """

    split: tuple[tuple[str, int, int], ...]
    summed: bool


@dataclass(frozen=True)
class Tail:
    """A module that is kept and works on full features; the last of its outputs go to this rank's heads.

    Such as positions of keys in latent attention: their gradients are summed over ranks.
    """

    features: int


@dataclass(frozen=True)
class Shared:
    """A module that is kept inside one that is summed: each rank counts its 1/R of what it returns."""


@dataclass(frozen=True)
class Kept:
    """A module whose parameters every rank keeps: "partial" or "replicated".

    partial: each rank sees its own features only, so that its gradient is one term of a sum
    """

    partial: bool


PlanEntry = Split | SharedHeads | Divided | Number | Parameters | Tail | Shared | Kept
# One module may have several of these.
BESIDE = (Divided, Number, Parameters, Tail)
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
    """The plan's entries for each module; an error names a pattern without module, or a module with two."""
    if not plan:
        raise ValueError("plan: expected at least one pattern, got none")
    named = dict(model.named_modules(remove_duplicate=False))
    named.pop("", None)
    found: list[Match] = []
    taken: dict[nn.Module, tuple[str, bool]] = {}
    for pattern, said in plan.items():
        entries = [_entry(pattern, each) for each in (said if isinstance(said, tuple) else (said,))]
        beside = all(isinstance(entry, BESIDE) for entry in entries)
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
    """Which heads of keys and values a rank's queries read, in their order, and as many on every rank.

    Each once, if as many of the rank's queries read each; else one for each query. Padding reads any.

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
    # queries of a rank lie in one group, or are complete groups
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


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown
