"""One `safetensors` file of the whole model: others read it without us, any number of ranks loads it.

Needs the package `safetensors`.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.interop.together import together
from tpkernels.interop.whole import load_whole, whole_state_dict
from tpkernels.layers.world import State


def save(path: str | os.PathLike[str], model: nn.Module, *, state: State = None) -> None:
    """Write whole tensors under the unsharded model's names, without vocabulary padding, to a new file.

    Called by all ranks of the world; rank 0 holds the whole model in memory, and writes it.

    state: as the model was built with; by default found in its layers
    """
    path = Path(path)
    with together(f"safetensors.save({path})"):
        _package("safetensors")
        if path.exists():
            raise FileExistsError("there is something already; remove it, or choose another name")
    write(path, whole_state_dict(model, state=state))


def write(path: str | os.PathLike[str], whole: dict[str, Tensor]) -> None:
    """Write rank 0's tensors to a file that is complete once it has its name. Called by all ranks."""
    path = Path(path)
    with together(f"safetensors.write({path})"):
        if dist.get_rank() == 0:
            unfinished = path.with_name(f".{path.name}.unfinished")
            contiguous = {name: tensor.contiguous() for name, tensor in whole.items()}
            _package("safetensors.torch").save_file(contiguous, unfinished, metadata={"format": "pt"})
            unfinished.replace(path)


def load(path: str | os.PathLike[str], model: nn.Module, *, cast: bool = False, state: State = None) -> None:
    """Read this rank's part of each tensor of a file that `save` wrote, or of a folder: see `read`.

    Called by all ranks of the world.

    cast: take tensors of another dtype too
    state: as the model was built with; by default found in its layers
    """
    with together(f"safetensors.load({path})"):
        whole = read(path)
    load_whole(model, whole, cast=cast, state=state)


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder with `model.safetensors` or `model.safetensors.index.json`.

    They are mapped from the file, not read: what is copied of them is read then.
    """
    whole: dict[str, Tensor] = {}
    for file in _files(Path(path)):
        with _package("safetensors").safe_open(file, framework="pt") as opened:
            names = opened.keys()
            whole |= {name: opened.get_tensor(name) for name in names}
    return whole


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return [path]


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the package safetensors is not installed; pip install safetensors"
        ) from error
