"""The files of a run: its folder of checkpoints, checked before the first step, and its JSON lines."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from tpkernels.files import parsed, read_bytes, replace_text, unused
from tpkernels.interop.raise_on_all_ranks import raise_on_all_ranks

_ABANDONED = ".abandoned"


def checkpoint_of(folder: Path, done: int) -> Path:
    return folder / f"step-{done:08}"


def prepare(folder: Path, *, resume: bool) -> None:
    """Prepare `folder` for checkpoints, or raise on all ranks; called by all of them."""
    with raise_on_all_ranks(f"--save {folder}"):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if not resume and _steps(folder):
                raise FileExistsError(
                    f"{folder} holds checkpoints of another run; pass --resume to continue from the last, or "
                    "another folder"
                )
            for path in folder.iterdir():  # of an interrupted save; the next save clears it
                if path.name.endswith(".unfinished") and path.is_symlink():
                    raise FileExistsError(f"expected no symbolic link at {path}; remove it")


def set_aside_after(folder: Path, done: int) -> None:
    """Rename checkpoints of later steps, because this run will write them again; called by all ranks.

    They exist if a run died before `latest` named them, or if a user wrote an earlier name into `latest`.
    """
    with raise_on_all_ranks(f"--resume from {folder}, after {done} steps"):
        if dist.get_rank() == 0:
            for step, path in _steps(folder).items():
                if step > done:
                    path.rename(unused(path.with_name(path.name + _ABANDONED)))


def _steps(folder: Path) -> dict[int, Path]:
    named = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match}


def opened_after(path: Path, done: int) -> tuple[TextIO, str]:
    """Open a file for the lines of later steps; return it, and a warning about damaged lines, or "".

    Lines of steps after the last checkpoint are dropped, because these steps run again. Lines without a step,
    as of a run killed while it wrote, stay in a copy of the file.
    """
    said = ""
    if done and path.is_file():
        lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
        steps = [_step_of(line) for line in lines]
        damaged = [number for number, step in enumerate(steps, start=1) if step is None and lines[number - 1]]
        if damaged:
            aside = unused(path.with_name(f"{path.name}.damaged"))
            shutil.copy2(path, aside)
            said = f"{path}: line {damaged[0]} holds no step; left out, and the file as it was is {aside}"
        kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= done]
        replace_text(path.resolve(), "".join(f"{line}\n" for line in kept))
        return path.open("a", encoding="utf-8"), said
    return path.open("w", encoding="utf-8"), said


def _step_of(line: str) -> int | None:
    try:
        found = parsed(line)
    except ValueError:
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None
