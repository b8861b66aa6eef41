"""Weights that modules share, of a model on the meta device: `to_empty` would give each module its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

Place = tuple[nn.Module, str]


def keep_ties(model: nn.Module) -> None:
    """Have parameters that are one stay one when they get memory."""
    places: dict[int, list[Place]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(id(parameter), []).append((owner, name))
    shared = [each for each in places.values() if len(each) > 1]
    if shared:
        inner = vars(model).get("_apply")
        model._apply = partial(_apply, model, inner, shared)  # type: ignore[method-assign]


def _apply(
    model: nn.Module,
    inner: Callable[..., nn.Module] | None,
    shared: list[list[Place]],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """What `to_empty`, `to` and their like call, in place of the model's own."""
    tied = [places for places in shared if len({id(owner._parameters[name]) for owner, name in places}) == 1]
    inner(fn, recurse) if inner else type(model)._apply(model, fn, recurse)
    for (first, short), *others in tied:
        for owner, name in others:
            owner._parameters[name] = first._parameters[short]
    return model
