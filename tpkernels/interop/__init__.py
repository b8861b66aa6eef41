"""Other libraries' names and formats. Modules are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers: the same names as in _MODULES
    from tpkernels.interop import dcp as dcp
    from tpkernels.interop import dtensor as dtensor
    from tpkernels.interop import full_state_dict as full_state_dict
    from tpkernels.interop import huggingface as huggingface
    from tpkernels.interop import megatron as megatron
    from tpkernels.interop import megatron_core as megatron_core
    from tpkernels.interop import mpu as mpu
    from tpkernels.interop import parallel_styles as parallel_styles
    from tpkernels.interop import safetensors as safetensors
    from tpkernels.interop.parallelize import plan as plan

_MODULES = (
    "dcp",
    "dtensor",
    "full_state_dict",
    "huggingface",
    "megatron",
    "mpu",
    "parallel_styles",
    "megatron_core",
    "plan",
    "safetensors",
)

if not TYPE_CHECKING:  # a checker that saw it would believe every misspelt name

    def __getattr__(name: str) -> ModuleType:
        if name not in _MODULES:
            raise AttributeError(f"module 'tpkernels.interop' has no attribute {name!r}")
        return import_module(f"tpkernels.interop.{'parallelize.' * (name == 'plan')}{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
