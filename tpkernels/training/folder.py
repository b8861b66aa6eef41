"""The folder of a run's checkpoints: looked at before the first step, not after hours of them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch.distributed as dist

from tpkernels.files import unused
from tpkernels.interop.raise_on_all_ranks import raise_on_all_ranks

_ABANDONED = ".abandoned"


def checkpoint_of(folder: Path, done: int) -> Path:
    return folder / f"step-{done:08}"


def prepare(folder: Path, *, resume: bool) -> None:
    """That checkpoints can be written into `folder`, or an error on all ranks; called by all of them."""
    with raise_on_all_ranks(f"--save {folder}"):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if not resume and _steps(folder):
                raise FileExistsError(
                    f"{folder} holds checkpoints of another run; pass --resume to go on from the last, or "
                    "another folder"
                )
            for path in folder.iterdir():  # of a save that was interrupted; the next one will clear it
                if path.name.endswith(".unfinished") and path.is_symlink():
                    raise FileExistsError(f"expected no symbolic link at {path}; remove it")


def set_aside_after(folder: Path, done: int) -> None:
    """Rename checkpoints of later steps, which this run will make again; called by all ranks.

    There are some if a run died before `latest` named them, or if somebody wrote an earlier one into it.
    """
    with raise_on_all_ranks(f"--resume from {folder}, after {done} steps"):
        if dist.get_rank() == 0:
            for step, path in _steps(folder).items():
                if step > done:
                    path.rename(unused(path.with_name(path.name + _ABANDONED)))


def _steps(folder: Path) -> dict[int, Path]:
    named = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match}
