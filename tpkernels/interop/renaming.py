"""Tensors under one library's names from those of another: a table of rules, read both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


def _alone(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Renaming:
    """One tensor of theirs is one of ours, or several of ours fused.

    theirs, ours: names, with {i} for the number of a layer
    split: theirs into ours; fuse: back
    """

    theirs: str
    ours: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]] = _alone
    fuse: Callable[..., Tensor] = _same


def to_ours(theirs: Mapping[str, Tensor], rules: Iterable[Renaming]) -> dict[str, Tensor]:
    """Tensors under our names. A name without a rule is an error."""
    rules = list(rules)
    ours: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in theirs.items():
        for rule in rules:
            if (layer := _layer(rule.theirs, name)) is not None:
                names = [_filled(each, layer) for each in rule.ours]
                ours |= dict(zip(names, rule.split(tensor), strict=True))
                break
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"expected tensors of a known architecture, got besides {unknown}")
    return ours


def to_theirs(ours: Mapping[str, Tensor], rules: Iterable[Renaming]) -> dict[str, Tensor]:
    """Tensors under their names, by the first rule for each. A name without a rule is an error."""
    theirs: dict[str, Tensor] = {}
    left = dict(ours)
    for rule in rules:
        for name in list(left):
            layer = _layer(rule.ours[0], name)
            names = [] if layer is None else [_filled(each, layer) for each in rule.ours]
            if layer is None or not all(each in left for each in names):
                continue
            theirs[_filled(rule.theirs, layer)] = rule.fuse(*(left.pop(each) for each in names))
    if left:
        raise ValueError(
            f"expected tensors of a GPT by name, and all parts of each, got besides {list(left)}"
        )
    return theirs


def _layer(template: str, name: str) -> str | None:
    """The number of the layer in a name that matches, "" if it has none; None if it does not match."""
    found = re.fullmatch(re.escape(template).replace(re.escape("{i}"), r"(\d+)"), name)
    return None if found is None else (found.groups() or ("",))[0]


def _filled(template: str, layer: str) -> str:
    return template.replace("{i}", layer)
