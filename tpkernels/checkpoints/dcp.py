"""Checkpoints of sharded training, by `torch.distributed.checkpoint`: saved at one size, loaded at another.

A checkpoint holds full tensors under the unsharded model's names, in as many files as there were ranks:

    model.NAME                      parameters and persistent buffers, without vocabulary padding
    optimizer.state.NAME.KEY        the optimizer's state of each parameter
    optimizer.groups                its options, and the parameters' names
    random.STREAM.DEVICE            random streams, a row for each rank
    extra                           what the caller adds: steps done, place in the data

Ranks write it under a temporary name and rename it when all are done; then the file `latest` next to it gets
its name. So a checkpoint under its own name is complete. `SHA256SUMS` in it has a sum of each file; `load`
checks them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as storage
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpkernels.checkpoints.dtensor import as_dtensor
from tpkernels.checkpoints.optimizer_state import GROUPS, STATE, OptimizerState
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.checkpoints.saved import (
    Planner,
    Reader,
    files_of,
    intact_files,
    read_metadata,
    require_sums,
    sums_of_own,
    write_sums,
)
from tpkernels.checkpoints.shards import TensorShard, require_alike, require_one_stage, shards_of, world_of
from tpkernels.errors import warn
from tpkernels.files import clear, read_bytes, replace_text
from tpkernels.groups import c10d
from tpkernels.groups.random import get_rng_tracker
from tpkernels.layers.world import State

LATEST = "latest"
MODEL, RANDOM = "model.", "random."  # prefixes of entries


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    state: State = None,
) -> None:
    """Write a new checkpoint, a folder at `path`, and write its name into the file `latest` next to it.

    Called by all ranks of the world, which share the file system.

    extra: the same on all ranks: numbers, text, tensors, and lists and dicts of them; other picklable objects
        are loaded with weights_only=False only
    state: as the model was built with; by default found in its layers
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    request = f"dcp.save({path})"
    with raise_on_all_ranks(request):
        if os.path.lexists(path):  # also a link that leads nowhere
            raise FileExistsError("there is something already; a checkpoint is never overwritten")
        require_one_stage(state)
        shards = shards_of(model, state)
        world = world_of(model, state)
        content: dict[str, Any] = {f"{MODEL}{name}": shard for name, shard in shards.items()}
        if optimizer is not None:
            content |= OptimizerState(optimizer, shards).content()
        content = _as_dtensors(content, world.group)
        content |= _rows_of_ranks(_streams()) | {"extra": extra, "sizes": _sizes(world.size)}
    with raise_on_all_ranks(request):
        if dist.get_rank() == 0:
            clear(unfinished)  # of a run that ended while it wrote
            unfinished.mkdir(parents=True)
    with _removed_on_failure(unfinished):
        _write(unfinished, content)
        own: dict[str, str] = {}
        with raise_on_all_ranks(request):
            own = sums_of_own(unfinished, dist.get_rank(), dist.get_world_size())
        sums = _gathered(own)
        with raise_on_all_ranks(request):
            if dist.get_rank() == 0:
                write_sums(unfinished, sums)
                unfinished.rename(path)
    with raise_on_all_ranks(request):
        if dist.get_rank() == 0:
            replace_text(path.with_name(LATEST), path.name)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    weights_only: bool = True,
    state: State = None,
) -> Any:
    """Load a checkpoint into the model, the optimizer and the random streams; return its `extra`.

    Called by all ranks of the world. Sums of files, names, shapes and dtypes are compared before anything is
    changed. Random streams are restored if the world and tensor-parallel sizes are the saved ones; otherwise
    they stay as they are, with a warning.

    weights_only: False: `extra` and the optimizer's options may be of any class; loading runs its code
    """
    path = Path(path)
    request = f"dcp.load({path})"
    with raise_on_all_ranks(request):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        summed = intact_files(path, dist.get_rank(), dist.get_world_size())
    with raise_on_all_ranks(request):  # once all sums were compared: they name the cause
        saved = read_metadata(path)
        require_sums(path, files_of(saved), summed)
        require_one_stage(state)
        shards = shards_of(model, state)
        world = world_of(model, state)
        weights = {n.removeprefix(MODEL): t for n, t in _described(saved, MODEL).items() if t is not None}
        require_alike(shards, weights, "the checkpoint is of another model:")
        header: dict[str, Any] = dict.fromkeys(("extra", "sizes"))
        if optimizer is not None:
            if GROUPS not in saved.state_dict_metadata:
                raise ValueError("it holds no optimizer; load without one")
            header[GROUPS] = None
    reader = Reader(path, saved)
    _read(reader, header, weights_only=weights_only)
    same_sizes = header["sizes"] == _sizes(world.size)
    with raise_on_all_ranks(request):
        content: dict[str, Any] = {f"{MODEL}{name}": shard for name, shard in shards.items()}
        resumed = None
        if optimizer is not None:
            resumed = OptimizerState(optimizer, shards)
            resumed.require_groups(header[GROUPS])
            content |= resumed.place_for(_described(saved, STATE))
        content = _as_dtensors(content, world.group)
        saved_streams = _described(saved, RANDOM).items() if same_sizes else ()
        streams = {n: torch.empty_like(t[:1], device="cpu") for n, t in saved_streams if t is not None}
        content |= _rows_of_ranks(streams)
    _read(reader, content, weights_only=weights_only)
    for shard in shards.values():
        shard.zero_padding()
    if resumed is not None:
        resumed.take(header[GROUPS], content)
    if same_sizes:
        _restore_streams(streams)
    else:
        warn(
            f"{request}: saved by {header['sizes']}, loaded by {_sizes(world.size)}: random streams stay as "
            "they are; call tpkernels.manual_seed(seed) with a seed that was not used before",
            stacklevel=2,
        )
    return header["extra"]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint that the file `latest` in `folder` names; None without this file."""
    try:
        name = read_bytes(Path(folder, LATEST)).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    found = Path(folder, name)
    if Path(name).name != name or name in ("", "..") or not found.is_dir():
        raise FileNotFoundError(
            f"{Path(folder, LATEST)} names {name!r}, which is not there; write the name of another "
            "checkpoint into it, or remove it to start anew"
        )
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    planner = storage.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        storage.save(content, storage_writer=storage.FileSystemWriter(path), planner=planner)
    except storage.CheckpointException as error:  # a BaseException, on all ranks
        raise RuntimeError(f"the checkpoint could not be written to {path}: {_causes(error)}") from error


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Remove an unfinished checkpoint: the disk may be full. Called by all ranks."""
    try:
        yield
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _gathered(own: dict[str, str]) -> dict[str, str]:
    """All-gather the sums of the ranks' files."""
    everybody: list[dict[str, str]] = [own] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return {name: value for some in everybody for name, value in some.items()}


def _read(reader: Reader, content: dict[str, Any], *, weights_only: bool) -> None:
    """Fill the tensors of `content`, and replace each None by the value that was saved."""
    try:
        storage.load(content, storage_reader=reader, planner=Planner(weights_only=weights_only))
    except storage.CheckpointException as error:  # a BaseException, on all ranks
        raise ValueError(f"the checkpoint {reader.path} could not be read: {_causes(error)}") from error


def _causes(error: storage.CheckpointException) -> str:
    """The errors and their ranks, without the stacks."""
    found: dict[str, list[str]] = {}
    for rank, (cause, _) in error.failures.items():
        found.setdefault(f"{type(cause).__name__}: {cause}", []).append(str(rank))
    return "; ".join(f"{text} (rank {', '.join(ranks)})" for text, ranks in found.items())


def _sizes(tensor: int) -> dict[str, int]:
    return {"world_size": dist.get_world_size(), "tensor": tensor}


def _as_dtensors(content: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    return {
        name: as_dtensor(value, group) if isinstance(value, TensorShard) else value
        for name, value in content.items()
    }


def _described(saved: Metadata, prefix: str) -> dict[str, Tensor | None]:
    """Return the entries whose names have the prefix: tensors on the meta device, None for other values."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in saved.state_dict_metadata.items()
        if name.startswith(prefix)
    }


def _streams() -> dict[str, Tensor]:
    """This rank's streams: each is a row of one tensor for all ranks."""
    return {
        f"{RANDOM}{stream}.{device}": value[None]
        for stream, generators in get_rng_tracker().get_states().items()
        for device, value in generators.items()
    }


def _rows_of_ranks(rows: dict[str, Tensor]) -> dict[str, DTensor]:
    world = dist.get_world_size()
    ranges = tuple((range(rank, rank + 1),) for rank in range(world))
    return {
        name: as_dtensor(
            TensorShard(row, (world, row.shape[1]), 0, ranges, dist.get_rank(), (0, 0)), c10d.default_group()
        )
        for name, row in rows.items()
    }


def _restore_streams(streams: dict[str, Tensor]) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for name, row in streams.items():
        stream, device = name.removeprefix(RANDOM).rsplit(".", 1)
        states.setdefault(stream, {})[device] = row[0]
    get_rng_tracker().set_states(states)
