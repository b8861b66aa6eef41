"""Megatron-Core's layers and names on our ops. Nothing here imports Megatron before its first use.

with megatron_core.layers():
    model = GPTModel(config, get_gpt_layer_local_spec(), ...)
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tpkernels import homes_in_stub

_HOMES = homes_in_stub(__file__)
_ALONE = ("groups", "import_hook")  # which need no Megatron


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(f"megatron_core.{name} needs Megatron: pip install megatron-core") from error


def __dir__() -> list[str]:
    """Names that can be imported: tools that list a module get each of them."""
    there = find_spec("megatron") is not None
    return sorted(name for name, home in _HOMES.items() if there or home.rpartition(".")[2] in _ALONE)
