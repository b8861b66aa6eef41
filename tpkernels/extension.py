"""Finds the C++ extension, and loads it only if it was built for the running torch."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.machinery import ExtensionFileLoader, PathFinder
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from tpkernels.files import cache_folder, why_not_ours

HOW_TO_BUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_PACKAGE = Path(__file__).parent
_STAMP = re.compile(rb"tpkernels built with torch ([0-9.]+)")


class ExtensionState(Enum):
    LOADED = "loaded"
    ABSENT = "absent"  # installed without torch or compiler: `buckets.engine` builds it when it is needed
    UNUSABLE = "unusable"  # built for another torch, or damaged: never ignored silently


@dataclass(frozen=True)
class Extension:
    state: ExtensionState
    detail: str  # where it is, or why not and what to do
    module: Any = None  # of functions that take what torch's dispatcher does not, if it is loaded


@cache
def extension() -> Extension:
    """Load the extension once, without building it; return its state."""
    installed = installed_library()
    library = installed or library_of_first_use()
    try:
        exists = library is not None and library.exists() and not lock_of_build(library.parent).exists()
        why = ""
        if library is not None and exists and installed is None:
            why = why_not_ours(library, folder_of_builds(library))
    except OSError as error:  # a folder of somebody else
        return Extension(ExtensionState.UNUSABLE, f"{library} cannot be looked at: {error}")
    if why:
        return Extension(ExtensionState.UNUSABLE, why)
    if library is None or not exists:
        return Extension(
            ExtensionState.ABSENT,
            "not built; the first GradientBuckets builds it, which takes a C++20 compiler and ninja, or: "
            + HOW_TO_BUILD,
        )
    return load(library)


def steps() -> Any:
    """Return the C++ functions for steps of calls, see `csrc/python_module.cpp`; None: Python does them."""
    return extension().module


def installed_library() -> Path | None:
    """Return the library that the install has built next to this code, and no other install's."""
    spec = PathFinder.find_spec("tpkernels._C", [str(_PACKAGE)])
    return Path(spec.origin) if spec and spec.origin else None


def sources() -> Path:
    """Return the folder of the C++ sources: in the package, or next to it in a checkout."""
    shipped = _PACKAGE / "csrc"
    return shipped if shipped.exists() else _PACKAGE.parent / "csrc"


def library_of_first_use() -> Path | None:
    """Return the path of the extension built at first use, by torch, Python, machine and source text."""
    folder = cache_folder()
    if folder is None or not sources().exists():
        return None
    text = hashlib.blake2b(digest_size=8)
    for source in sorted(sources().iterdir()):
        if source.is_file():
            text.update(f"{source.name}\n".encode() + source.read_bytes())
    built_for = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    return folder / "extension" / f"{built_for}-{text.hexdigest()}" / "tpkernels_C.so"


def folder_of_builds(library: Path) -> Path:
    """Return the cache folder, in which a library of first use lies."""
    return library.parents[2]


def lock_of_build(folder: Path) -> Path:
    """Return the file that torch holds there while it builds: the library may be half written."""
    return folder / "lock"


def load(library: Path) -> Extension:
    """Check the stamp of `library`, then load it. The stamp is read as text, not run: code built for
    another torch imports without complaint and misbehaves later."""
    try:
        stamp = _STAMP.search(library.read_bytes())
    except OSError as error:
        return Extension(ExtensionState.UNUSABLE, f"{library} cannot be read: {error}")
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
    found = f"{library.name}, built for torch {built_with}"
    return Extension(ExtensionState.LOADED, found, _python_module(library))


def _python_module(library: Path) -> Any:
    """Return the Python module in a loaded library; None if it was built without Python's headers.

    Also None without the GIL, which its borrowed references need.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    loader = ExtensionFileLoader("tpkernels._C", str(library))
    try:
        module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
    except ImportError:
        return None
    return module


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
