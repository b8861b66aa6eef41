"""Reads a checkpoint's folder as data: runs no code in it, and opens no file outside it.

torch pickles a checkpoint's `.metadata`, and unpickling runs any code that a file names. Here only the
classes of torch's own metadata are allowed, and their numbers are checked before they are used. The folder
also has a file of SHA-256 sums of all files, so that a damaged file is an error; `sha256sum --check
SHA256SUMS` in the folder checks them without this package.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
from collections.abc import Container, Iterable
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed import checkpoint as storage
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from tpkernels.files import read_bytes, replace_text

METADATA = ".metadata"
SUMS = "SHA256SUMS"
_AT_ONCE = 1 << 20  # bytes: enough that the calls themselves cost nothing
_OF_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def read_metadata(folder: Path) -> Metadata:
    """Return the checked metadata of the checkpoint in `folder`: its entries and their files."""
    content = read_bytes(folder / METADATA)
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        _require_sound(metadata, folder)
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(
            f"{folder / METADATA} is damaged, or not of a checkpoint ({type(error).__name__}: {error}); "
            "restore it from a copy, or take an earlier checkpoint"
        ) from error
    metadata.storage_meta = StorageMeta()  # instead of the path that it was written to
    assert isinstance(metadata, Metadata)
    return metadata


def files_of(metadata: Metadata) -> set[str]:
    """Return the names of the checkpoint's files."""
    return {METADATA} | {info.relative_path for info in metadata.storage_data.values()}


class Reader(storage.FileSystemReader):
    """A reader that uses checked `metadata` instead of reading it again."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class Planner(storage.DefaultLoadPlanner):
    """Fills tensors, and replaces None by loaded values; with weights_only torch runs no code for these."""

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=self._weights_only)
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            how = "" if not self._weights_only else _OF_OTHER_CLASSES
            raise ValueError(f"'{name}' cannot be read ({type(error).__name__}: {said}){how}") from error


_OF_OTHER_CLASSES = (
    "; if it holds other classes than torch's and Python's plain ones, pass weights_only=False if you trust "
    "its author, or pass the classes to torch.serialization.add_safe_globals"
)


class _Unpickler(pickle.Unpickler):
    """Allows torch's dataclasses, enums, sizes and dtypes, and its function that looks up a layout."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _OF_RECORDS:
            found = getattr(import_module(module), name, None)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        elif module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, torch.dtype):
                return found
        elif (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        elif module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath  # where it was written
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _require_sound(metadata: Metadata, folder: Path) -> None:
    """Raise, with any exception, unless every name and number in the metadata is valid."""
    _require(isinstance(metadata, Metadata), f"expected Metadata, got {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        _require(isinstance(name, str), f"expected a name, got {name!r}")
        if not isinstance(entry, BytesStorageMetadata):
            _require(isinstance(entry, TensorStorageMetadata), f"'{name}': got {type(entry).__name__}")
            _require_covered(name, entry)
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        _require(isinstance(index, MetadataIndex), f"expected an index, got {index!r}")
        _require(isinstance(info, filesystem._StorageInfo), f"{index}: got {type(info).__name__}")
        file = info.relative_path
        _require(Path(file).name == file and file != "..", f"expected a file in the folder, got {file!r}")
        _require(not info.transform_descriptors, f"{file}: expected plain files, got transformed ones")
        if file not in sizes:
            _require((folder / file).is_file(), f"{file} is missing")
            sizes[file] = (folder / file).stat().st_size
        end = info.offset + info.length
        _require(
            min(info.offset, info.length) >= 0 and end <= sizes[file],
            f"{file}: expected at least {end} bytes, it has {sizes[file]}",
        )


def _require_covered(name: str, entry: TensorStorageMetadata) -> None:
    """Raise unless chunks lie in the tensor and cover it: torch would leave other elements unloaded."""
    size = tuple(entry.size)
    _require(isinstance(entry.properties.dtype, torch.dtype), f"'{name}': got no dtype")
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, size, strict=True)
        _require(
            all(min(start, length) >= 0 and start + length <= full for start, length, full in ends),
            f"'{name}' of {size}: got a chunk of {tuple(chunk.sizes)} at {tuple(chunk.offsets)}",
        )
    held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    _require(held == math.prod(size), f"'{name}': expected {math.prod(size)} elements, got {held}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def sums_of_own(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """Return the sums of this rank's files by name; each file belongs to one rank."""
    names = [path.name for path in folder.iterdir()]
    return {name: _sum(folder / name) for name in names if _is_ours(name, rank, ranks)}


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write the sums of all files into the folder."""
    replace_text(folder / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def intact_files(folder: Path, rank: int, ranks: int) -> set[str]:
    """Check the sums of this rank's files; return the names of all files."""
    if not os.path.lexists(folder / SUMS):
        raise ValueError(f"{folder / SUMS} is missing; {_CURE}")
    sums = _parsed(folder, read_bytes(folder / SUMS).decode(errors="replace"))
    for name, expected in sums.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing; {_CURE}")
        if _is_ours(name, rank, ranks) and (found := _sum(folder / name)) != expected:
            raise ValueError(f"{folder / name} is damaged: expected SHA-256 {expected}, got {found}; {_CURE}")
    return set(sums)


def require_sums(folder: Path, needed: Iterable[str], summed: Container[str]) -> None:
    """Raise if a file that will be read has no sum."""
    for name in needed:
        if name not in summed:
            raise ValueError(f"{folder / SUMS} is damaged: it has no sum of {name}; {_CURE}")


_CURE = "restore it from a copy, or go on from an earlier checkpoint by writing its name into `latest`"


def _parsed(folder: Path, text: str) -> dict[str, str]:
    sums = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/\\\0]+)", line)
        if match is None:
            raise ValueError(f"{folder / SUMS} is damaged in line {number}; {_CURE}")
        sums[match[2]] = match[1]
    return sums


def _is_ours(name: str, rank: int, ranks: int) -> bool:
    """Whether a file is this rank's, by the rank in torch's name modulo `ranks`; other files are rank 0's."""
    match = re.match(r"__(\d+)_", name)
    return (int(match[1]) if match else 0) % ranks == rank


def _sum(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
