"""Tensor-parallel layers for PyTorch on fused Triton kernels with overlapped communication.

The names in `__init__.pyi` are imported when they are first used: `import tpkernels` alone loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as \w+", re.MULTILINE)


def homes_in_stub(init: str) -> Mapping[str, str]:
    """Return the module of each public name, from the stub next to an `__init__.py`.

    Type checkers read the stub itself, and so see the same names.

    init: `__file__` of the package
    """
    stub = Path(init).with_name("__init__.pyi").read_text()
    return {name: module for module, name in _IMPORT.findall(stub)}


_HOMES = homes_in_stub(__file__)
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tpkernels' has no attribute {name!r}")
    return import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
