"""Other libraries' names and formats. The modules in `__init__.pyi` are imported at their first use."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tpkernels import homes_in_stub

_HOMES = homes_in_stub(__file__)


def __getattr__(name: str) -> ModuleType:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpkernels.interop' has no attribute {name!r}")
    return import_module(f"{_HOMES[name]}.{name}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
