"""Tables of a model's vocabulary: its input embeddings and its head, which may share a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tpkernels.interop.parallelize.hf_modules import is_linear
from tpkernels.interop.parallelize.plan import Entry, Split

Said = dict[str, Entry | tuple[Entry, ...]]


def with_vocabulary(model: nn.Module, plan: Said) -> Said:
    """The plan with entries for the input embeddings and the head of a model of `transformers`.

    Layers that share a parameter are split alike: all of them, or none where one cannot be, whatever the plan
    says of them.
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
    """Of a model of `transformers`, those that it names."""
    found = [_called(model, "get_input_embeddings"), _called(model, "get_output_embeddings")]
    return [table for table in found if table is not None]


def _sharing(model: nn.Module, table: nn.Module) -> dict[str, nn.Module]:
    """The modules that share a parameter with a table, or with one that does."""
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
