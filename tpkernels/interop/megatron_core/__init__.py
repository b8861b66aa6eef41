"""Megatron-Core on our ops: its layers, and its names. Nothing here imports Megatron before it is used.

with megatron_core.layers():
    model = GPTModel(config, get_gpt_layer_local_spec(), ...)
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers: the same names as in _HOME
    from tpkernels.interop.megatron_core.column import ColumnParallelLinear as ColumnParallelLinear
    from tpkernels.interop.megatron_core.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from tpkernels.interop.megatron_core.grid import HyperCommGrid as HyperCommGrid
    from tpkernels.interop.megatron_core.groups import ProcessGroupCollection as ProcessGroupCollection
    from tpkernels.interop.megatron_core.groups import from_megatron as from_megatron
    from tpkernels.interop.megatron_core.import_hook import install as install
    from tpkernels.interop.megatron_core.import_hook import installed as installed
    from tpkernels.interop.megatron_core.import_hook import uninstall as uninstall
    from tpkernels.interop.megatron_core.linear import (
        linear_with_frozen_weight as linear_with_frozen_weight,
    )
    from tpkernels.interop.megatron_core.linear import (
        linear_with_grad_accumulation_and_async_allreduce as linear_with_grad_accumulation_and_async_allreduce,  # noqa: E501
    )
    from tpkernels.interop.megatron_core.norm import LayerNorm as LayerNorm
    from tpkernels.interop.megatron_core.norm import RMSNorm as RMSNorm
    from tpkernels.interop.megatron_core.norm import build_norm as build_norm
    from tpkernels.interop.megatron_core.replace import layers as layers
    from tpkernels.interop.megatron_core.row import RowParallelLinear as RowParallelLinear
    from tpkernels.interop.megatron_core.spec import spec_provider as spec_provider

_HOME = {
    "ColumnParallelLinear": "column",
    "VocabParallelEmbedding": "embedding",
    "linear_with_frozen_weight": "linear",
    "linear_with_grad_accumulation_and_async_allreduce": "linear",
    "LayerNorm": "norm",
    "RMSNorm": "norm",
    "build_norm": "norm",
    "layers": "replace",
    "RowParallelLinear": "row",
    "spec_provider": "spec",
    "HyperCommGrid": "grid",
    "ProcessGroupCollection": "groups",
    "from_megatron": "groups",
    "install": "import_hook",
    "installed": "import_hook",
    "uninstall": "import_hook",
}
_ALONE = ("grid", "groups", "import_hook")  # which need no Megatron

if not TYPE_CHECKING:  # a checker that saw it would believe every misspelt name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("megatron"):
                raise
            raise ImportError(f"megatron_core.{name} needs Megatron: pip install megatron-core") from error


def __dir__() -> list[str]:
    """What can be had: tools that list a module ask for all of it."""
    there = find_spec("megatron") is not None
    return sorted(name for name, home in _HOME.items() if there or home in _ALONE)
