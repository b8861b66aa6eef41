"""Reading and replacing files that may be damaged, half written, or not regular files."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; ValueError for others, such as a FIFO, which could block."""
    # checked after opening, so that it cannot be replaced in between
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"expected a regular file at {path}, got something else")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """As `read_bytes`, decoded; ValueError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def why_not_ours(path: Path, root: Path) -> str:
    """Return why what lies at `path`, in our folder `root`, is not used: others can have written it. "": ours

    root: a folder above it; those above that are the machine's business
    """
    if not hasattr(os, "getuid"):  # not a POSIX system
        return ""
    for place in (path, *path.parents):
        found = place.stat()
        if found.st_uid not in (os.getuid(), 0):
            return (
                f"{place} belongs to user {found.st_uid}, who may have planted it; remove it, or set "
                "TPKERNELS_CACHE_DIR to a folder of your own"
            )
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
            return (
                f"{place} can be written by other users, who may have changed what is in it; remove it, or "
                "allow it to nobody else (chmod go-w) if you trust all that is there"
            )
        if place == root:
            break
    return ""


def _is_own_group(number: int) -> bool:
    """Whether a group has this user alone, as where each has one of the same name."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}


def read_own(path: Path, root: Path) -> str:
    """As `read_text`; PermissionError if others can have written the file, or a folder up to `root`."""
    if why := why_not_ours(path, root):
        raise PermissionError(why)
    return read_text(path)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, into which only this user may write."""
    for each in (*reversed(path.parents), path):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)


def parsed(text: str) -> Any:
    """Return the value of a JSON text; ValueError if it is no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def clear(path: Path) -> None:
    """Remove the temporary file or folder that a run left when it ended early.

    A symbolic link is refused: its target may belong to others.
    """
    if path.is_symlink():
        raise FileExistsError(f"expected no symbolic link at {path}; remove it, nothing was written")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically. Called by one process at a time.

    A symbolic link is replaced itself; its target does not change.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    clear(unfinished)
    with unfinished.open("x", encoding="utf-8") as file:  # x: fails if a link was created meanwhile
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if path.is_file() and not path.is_symlink():
        shutil.copymode(path, unfinished)
    unfinished.replace(path)


def unused(path: Path) -> Path:
    """Return the path, or the path with a number, that does not exist yet."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def cache_folder() -> Path | None:
    """Return TPKERNELS_CACHE_DIR, or tpkernels in the user's cache folder; None without a home folder."""
    if chosen := os.environ.get("TPKERNELS_CACHE_DIR"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tpkernels"
    try:
        return Path.home() / ".cache" / "tpkernels"
    except RuntimeError:  # a user whom the machine does not know, as in some containers
        return None
