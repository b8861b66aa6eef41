"""Renames tensors between two libraries by a table of rules that is read both ways."""

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
    """A rule: one of their tensors is one of ours, or several of ours fused.

    theirs, ours: names, with {i} for the number of a layer
    split: splits their tensor into ours; fuse: the inverse
    """

    theirs: str
    ours: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]] = _alone
    fuse: Callable[..., Tensor] = _same


def to_ours(theirs: Mapping[str, Tensor], rules: Iterable[Renaming]) -> dict[str, Tensor]:
    """Return tensors under our names; raise for a name without a rule."""
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
        raise ValueError(f"expected tensors of a known architecture, got also {unknown}")
    return ours


def to_theirs(ours: Mapping[str, Tensor], rules: Iterable[Renaming]) -> dict[str, Tensor]:
    """Return tensors under their names, by the first rule for each; raise for a name without a rule."""
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
        raise ValueError(f"expected tensors of a GPT by name, and all parts of each, got also {list(left)}")
    return theirs


def _layer(template: str, name: str) -> str | None:
    """Return the layer's number in a matching name, "" without a number; None if the name does not match."""
    found = re.fullmatch(re.escape(template).replace(re.escape("{i}"), r"(\d+)"), name)
    return None if found is None else (found.groups() or ("",))[0]


def _filled(template: str, layer: str) -> str:
    return template.replace("{i}", layer)
