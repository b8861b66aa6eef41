"""Tensor-parallel layers for PyTorch on fused Triton kernels with overlapped communication.

The names in `__init__.pyi` are imported when they are first used: `import tpkernels` alone loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tpkernels.lazy_names import homes_in_stub

__version__ = "0.1.0"

_HOMES = homes_in_stub(__file__)
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tpkernels' has no attribute {name!r}")
    return import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
