"""Plans of how a model is split: patterns of module names, and what becomes of the modules that fit.

    column      nn.Linear whose output features are split; what follows gets this rank's
    row         nn.Linear whose input features are split already; its output is whole
    head        nn.Linear whose output features are split and gathered: any number of them
    embedding   nn.Embedding whose rows are split: any number of them
    partial     any module that is kept and works on this rank's features: gradients are summed over ranks
    replicated  any module that is kept and works on full features, wherever it stands

Patterns are those of `fnmatch`: * stands for anything, dots too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

Kind = Literal["column", "row", "head", "embedding"]
KINDS = ("column", "row", "head", "embedding")
KEPT = ("partial", "replicated")


@dataclass(frozen=True)
class Split:
    """One of the kinds, in detail.

    unit: features that may not be parted, such as those of an attention head
    stacked: so many weights lie one after the other in one, and each is split; column only
    """

    kind: Kind
    unit: int = 1
    stacked: int = 1


@dataclass(frozen=True)
class Divided:
    """A module that is kept, but has a number of features in an attribute: each rank has its part of them."""

    attribute: str


@dataclass(frozen=True)
class Kept:
    """A module whose parameters every rank keeps: "partial" or "replicated".

    partial: each rank's gradient is a term of the sum, for it sees this rank's features only
    """

    partial: bool


Plan = Mapping[str, Kind | Literal["partial", "replicated"] | Split | Divided | Kept]


@dataclass(frozen=True)
class Match:
    name: str
    module: nn.Module
    entry: Split | Divided | Kept


def matches(model: nn.Module, plan: Plan) -> list[Match]:
    """What the plan says of which module; an error names a pattern without module, or a module with two."""
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
        for name, module in fitting:
            other, _ = found.setdefault(module, (pattern, Match(name, module, entry)))
            if other != pattern:
                raise ValueError(f"plan: '{name}' fits both {other!r} and {pattern!r}; make one narrower")
    return [match for _, match in found.values()]


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
