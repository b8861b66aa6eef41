"""Finds the C++ extension, and loads it only if it was built for the torch that runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

HOW_TO_BUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_STAMP = re.compile(rb"tpkernels built with torch ([0-9.]+)")


class ExtensionState(Enum):
    LOADED = "loaded"
    ABSENT = "absent"  # an install without torch or compiler: pure Python does the work
    UNUSABLE = "unusable"  # built for another torch, or damaged: never ignored silently


@dataclass(frozen=True)
class Extension:
    state: ExtensionState
    detail: str  # where it is, or why not and what to do


@cache
def extension() -> Extension:
    """Load the extension, once; say what became of it."""
    spec = find_spec("tpkernels._C")
    if spec is None or spec.origin is None:
        return Extension(
            ExtensionState.ABSENT,
            f"not built for this Python; with torch and a C++20 compiler at hand: {HOW_TO_BUILD}",
        )
    return load(Path(spec.origin))


def load(library: Path) -> Extension:
    """Check the stamp of `library`, then load it. The stamp is read as text, not run: code built for
    another torch imports without complaint and misbehaves later."""
    stamp = _STAMP.search(library.read_bytes())
    if stamp is None:
        return Extension(
            ExtensionState.UNUSABLE, f"{library} is not ours or damaged; rebuild: {HOW_TO_BUILD}"
        )
    built_with = stamp[1].decode()
    if _minor(built_with) != _minor(torch.__version__):
        return Extension(
            ExtensionState.UNUSABLE,
            f"built for torch {built_with}, but torch {torch.__version__} runs; rebuild: {HOW_TO_BUILD}",
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return Extension(ExtensionState.UNUSABLE, f"{error}; rebuild: {HOW_TO_BUILD}")
    return Extension(ExtensionState.LOADED, f"{library.name}, built for torch {built_with}")


def available() -> bool:
    """Whether the extension can be used. An extension that is there but unusable is an `ImportError`."""
    found = extension()
    if found.state is ExtensionState.UNUSABLE:
        raise ImportError(f"tpkernels' C++ extension is unusable: {found.detail}")
    return found.state is ExtensionState.LOADED


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
