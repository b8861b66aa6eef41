"""Differentiable operators: local or over a group, any leading dimensions, autocast, torch.compile.

The names in `__init__.pyi` are imported when they are first used: a linear layer loads no loss.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tpkernels import homes_in_stub

_HOMES = homes_in_stub(__file__)
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpkernels.ops' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(_HOMES)
