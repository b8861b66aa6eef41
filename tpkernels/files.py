"""Files that others may have swapped, damaged or left half written: read and replaced without surprises."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Of a regular file; ValueError for what a reader could wait for without end, such as a FIFO."""
    # opened without waiting, and looked at once it is open: nobody can swap it in between
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"expected a regular file at {path}, got something else")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """As `read_bytes`, of UTF-8; ValueError for what is not."""
    return read_bytes(path).decode("utf-8")


def parsed(text: str) -> Any:
    """The value of a JSON text; ValueError for what is none, and for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def clear(path: Path) -> None:
    """Remove what a run that ended early left under a temporary name.

    A symbolic link is refused: what it leads to is not ours to write or to remove.
    """
    if path.is_symlink():
        raise FileExistsError(f"expected no symbolic link at {path}; remove it, nothing was written")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """The file has its old text or all of the new one, whatever happens. Called by one process at a time.

    A symbolic link is replaced itself; what it leads to stays as it is.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    clear(unfinished)
    with unfinished.open("x", encoding="utf-8") as file:  # x: not through a link that came meanwhile
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if path.is_file() and not path.is_symlink():
        shutil.copymode(path, unfinished)
    unfinished.replace(path)


def unused(path: Path) -> Path:
    """The path, or one with a number behind it, where nothing lies yet."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def cache_folder() -> Path | None:
    """TPKERNELS_CACHE_DIR, or else tpkernels in the user's cache folder; None if there is no home."""
    if chosen := os.environ.get("TPKERNELS_CACHE_DIR"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tpkernels"
    try:
        return Path.home() / ".cache" / "tpkernels"
    except RuntimeError:  # a user whom the machine does not know, as in some containers
        return None
