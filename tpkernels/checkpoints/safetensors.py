"""Saves the full model to one `safetensors` file that any number of ranks, or other programs, can load.

Needs the package `safetensors`.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.files import clear, parsed, read_text
from tpkernels.layers.world import State


def save(path: str | os.PathLike[str], model: nn.Module, *, state: State = None) -> None:
    """Write full tensors under the unsharded model's names, without vocabulary padding, to a new file.

    Called by all ranks of the world; rank 0 gathers the full model in memory, and writes it.

    state: as the model was built with; by default found in its layers
    """
    path = Path(path)
    with raise_on_all_ranks(f"safetensors.save({path})"):
        _package("safetensors")
        if os.path.lexists(path):  # also a link that leads nowhere
            raise FileExistsError("there is something already; remove it, or choose another name")
    write(path, full_state_dict(model, state=state))


def write(path: str | os.PathLike[str], whole: dict[str, Tensor]) -> None:
    """Write rank 0's tensors to a temporary file, and rename it when complete. Called by all ranks."""
    path = Path(path)
    with raise_on_all_ranks(f"safetensors.write({path})"):
        if dist.get_rank() == 0:
            unfinished = path.with_name(f".{path.name}.unfinished")
            clear(unfinished)  # of a process that ended while it wrote
            contiguous = {name: tensor.contiguous() for name, tensor in whole.items()}
            _package("safetensors.torch").save_file(contiguous, unfinished, metadata={"format": "pt"})
            unfinished.replace(path)


def load(path: str | os.PathLike[str], model: nn.Module, *, cast: bool = False, state: State = None) -> None:
    """Load this rank's shard of each tensor of a file that `save` wrote, or of a folder: see `read`.

    Called by all ranks of the world.

    cast: convert tensors of another dtype
    state: as the model was built with; by default found in its layers
    """
    with raise_on_all_ranks(f"safetensors.load({path})"):
        full = read(path)
    load_full_state_dict(model, full, cast=cast, state=state)


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return tensors of a file, or of a folder with `model.safetensors` or `model.safetensors.index.json`.

    They are memory-mapped: a part is read from disk when it is copied.
    """
    full: dict[str, Tensor] = {}
    for file, expected in _files(Path(path)).items():
        found = _tensors(file)
        if missing := [name for name in expected if name not in found]:
            raise ValueError(f"{file}: expected the tensors that the index names, {missing} are missing")
        if twice := [name for name in found if name in full]:
            raise ValueError(f"{file}: expected each tensor in one file, {twice} are in another, too")
        full |= found
    return full


def _tensors(file: Path) -> dict[str, Tensor]:
    package = _package("safetensors")
    if not file.is_file():  # opening a FIFO would block
        raise FileNotFoundError(f"there is no file {file}")
    try:
        with package.safe_open(file, framework="pt") as opened:
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}
    except package.SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error


def _files(path: Path) -> dict[Path, list[str]]:
    """Return each file with the names of its tensors from the index, or with none without an index."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return {path / "model.safetensors" if path.is_dir() else path: []}
    try:
        weight_map = parsed(read_text(index))["weight_map"]
        entries = [(str(name), Path(file)) for name, file in weight_map.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{index}: expected JSON with a weight_map, the file of each tensor, got {error!r}"
        ) from error
    files: dict[Path, list[str]] = {}
    for name, file in sorted(entries, key=lambda entry: entry[1]):
        files.setdefault(_within(path, file, index), []).append(name)
    return files


def _within(folder: Path, file: Path, index: Path) -> Path:
    """Return the path of a file that an index names; raise unless it is in the index's own folder."""
    top = folder.resolve()
    inside = [top]
    if top.parent.name == "snapshots":  # of Hugging Face's cache, whose files are links to its blobs
        inside.append(top.parent.parent / "blobs")
    found = (folder / file).resolve()
    if file.is_absolute() or ".." in file.parts or not any(found.is_relative_to(place) for place in inside):
        raise ValueError(f"{index}: expected files in its own folder, got {str(file)!r}, which is {found}")
    return folder / file


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the package safetensors is not installed; pip install safetensors"
        ) from error
