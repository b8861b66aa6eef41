"""Answers of child processes, kept for as long as the modules that they came from stay the same."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tpkernels
from tpkernels.gate.disk_cache import DiskCache

PINNED = ("torch", "triton", "numpy")  # whose versions stand for their files
VARIABLES = ("PYTHON", "TRITON", "TORCH", "CUDA")  # beginnings of their names: of those that may matter


def imported_files() -> list[str]:
    """The files of all modules in this process but Python's, this package's and those of PINNED."""
    ours = str(Path(tpkernels.__file__).parent)
    folders = (ours, *_standard(), *(str(Path(str(find_spec(name).origin)).parent) for name in PINNED))  # type: ignore[union-attr]
    files = {str(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    return sorted(file for file in files if file and not _in(file, folders))


def _standard() -> list[str]:
    return [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]


def _in(file: str, folders: Sequence[str]) -> bool:
    for folder in folders:
        rest = file.removeprefix(folder)
        if rest != file and not rest.startswith(("/site-packages", "/dist-packages")):
            return True
    return False


class Memory:
    """The answers of one program to items about a folder."""

    def __init__(self, program: str, folder: Path, variables: Mapping[str, str]) -> None:
        seen = {name: one for name, one in os.environ.items() if name.startswith(VARIABLES)} | {**variables}
        versions = [sys.version, *(version(name) for name in PINNED), _own_sources()]
        self._depends = json.dumps([program, str(folder), os.getcwd(), seen, versions], sort_keys=True)
        self._cache = DiskCache.of_user("answers")

    def of(self, item: Mapping[str, Any]) -> dict[str, Any] | None:
        kept = self._cache.get(self._key(item))
        if not isinstance(kept, dict) or _digest(kept["files"]) != kept["digest"]:
            return None
        return {**kept["answer"], "sources": self._sources(kept["digest"])}

    def keep(self, item: Mapping[str, Any], files: Sequence[str], answer: dict[str, Any]) -> dict[str, Any]:
        """Keep an answer; returns it with a hash of its files."""
        digest = _digest(tuple(files))
        self._cache.put(self._key(item), {"files": files, "digest": digest, "answer": answer})
        return {**answer, "sources": self._sources(digest)}

    def _sources(self, digest: str) -> str:
        return hashlib.sha256(f"{self._depends} {digest}".encode()).hexdigest()

    def _key(self, item: Mapping[str, Any]) -> str:
        return f"{self._depends} {json.dumps(item, sort_keys=True)}"


def _digest(files: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{file} {_content(file)}\n" for file in files).encode()).hexdigest()


def _content(file: str) -> str:
    try:
        found = os.stat(file)
        return _hash(file, found.st_mtime_ns, found.st_size)
    except OSError:
        return "absent"


@cache
def _hash(file: str, changed: int, size: int) -> str:
    """Of a file that was not written since, in this process."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@cache
def _own_sources() -> str:
    """A hash of what this package interprets and records with."""
    folder = Path(tpkernels.__file__).parent
    files = [*(folder / "gate").rglob("*.py"), *(folder / "registered").rglob("*.py")]
    files += (folder / "kernels").rglob("*.py")
    return _digest(sorted(map(str, files)))
