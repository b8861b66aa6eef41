"""Keeps choices on disk: a JSON file for each GPU and set of versions, shared by the processes of a user.

    {"format": 1, "versions": {"gpu": ..., ...}, "choices": {key: {"name": ..., "milliseconds": {...}}}}

A choice may also have "captured": who computes the problem in captured graphs, where it is another.

A file is only ever replaced as a whole, under a lock, by the union of what it held and what is new: readers
never see half of one, and writers lose nothing of each other's. Where there is no lock to be had (on some
network file systems) two writers at one moment may lose a choice, which is then timed again one day.

A cache is a help, not a need: whatever is wrong with it costs one warning and the choices that it held.

Ranks that compute the same thing must choose the same kernel, or differ in bits. They come to a problem at
different moments, or never, so no collective can settle it. The first rank to decide publishes its choice in
a key-value store, where the first value under a key stays; all others take it (`Published`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch

from tpkernels.dispatch.log import warnings
from tpkernels.files import parsed, read_own

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
LOCK_SECONDS = 2.0
KERNELS = Path(__file__).parents[1] / "kernels"


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that choices depend on; under other versions they do not count."""

    gpu: str
    torch: str  # with the CUDA version behind it: "2.11.0+cu130"
    triton: str
    kernels: str  # hash of our kernels' source

    @property
    def slug(self) -> str:
        """The versions as a file name."""
        return f"{gpu_slug(self.gpu)}_torch-{self.torch}_triton-{self.triton}_kernels-{self.kernels}"


def versions_for(gpu: str) -> Versions:
    """Return the versions of this process, on a GPU of this name."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return Versions(gpu, torch.__version__, triton, source_hash(KERNELS))


@cache
def source_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpu_slug(gpu: str) -> str:
    """Return a GPU's name as part of a file name.

    >>> gpu_slug("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Choice:
    """The name of the candidate that computes a problem, and the times that decided for it."""

    name: str
    milliseconds: Mapping[str, float]
    captured: str = ""  # who computes it in a captured graph; "": the same

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.captured) if self.captured else (self.name,)

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "captured" or value}


class ForeignFile(ValueError):
    """A file does not hold choices of our format and versions."""


def parse(text: str) -> tuple[dict[str, object], dict[str, Choice]]:
    """Return the versions and choices in the text of a file."""
    try:
        content = parsed(text)
    except ValueError as error:
        raise ForeignFile(f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForeignFile(f"it is not of format {FORMAT}")
    versions, entries = content.get("versions"), content.get("choices")
    if not isinstance(versions, dict) or not isinstance(entries, dict):
        raise ForeignFile("it has no versions or no choices")
    return versions, {key: choice_of(entry) for key, entry in entries.items()}


def choice_of(entry: object) -> Choice:
    """Return the choice in a JSON value."""
    if isinstance(entry, dict):
        name, milliseconds, captured = (
            entry.get("name"),
            entry.get("milliseconds"),
            entry.get("captured", ""),
        )
        if isinstance(name, str) and isinstance(milliseconds, dict) and isinstance(captured, str):
            with suppress(TypeError, ValueError, OverflowError):
                return Choice(name, {str(k): float(v) for k, v in milliseconds.items()}, captured)
    raise ForeignFile(f"{entry!r:.60} is not a choice")


def render(versions: Versions, choices: Mapping[str, Choice]) -> str:
    entries = {key: choices[key].as_json() for key in sorted(choices)}
    return json.dumps({"format": FORMAT, "versions": asdict(versions), "choices": entries}, indent=1) + "\n"


class Cache:
    """The choices of one set of versions; in memory alone if `folder` is None or cannot be used."""

    def __init__(self, folder: Path | None, versions: Versions) -> None:
        self.versions = versions
        self._path = None if folder is None else folder / f"{versions.slug}.json"
        self._warned = False
        self._choices = self._read()

    @property
    def path(self) -> Path | None:
        return self._path

    @property
    def choices(self) -> Mapping[str, Choice]:
        return self._choices

    def get(self, key: str) -> Choice | None:
        return self._choices.get(key)

    def put(self, key: str, choice: Choice) -> None:
        """Keep a choice, and take over what other processes have written since."""
        self._choices[key] = choice
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path.with_suffix(".lock")):
                # what others wrote is newer than what was read before; this choice is newer still
                self._choices = self._choices | self._read() | {key: choice}
                _replace(self._path, render(self.versions, self._choices))
        except OSError as error:
            self._warn(f"cannot write {self._path} ({error}): choices live as long as this process")
            self._path = None

    def _read(self) -> dict[str, Choice]:
        if self._path is None:
            return {}
        try:
            versions, choices = parse(read_own(self._path, self._path.parent))
            if versions != asdict(self.versions):
                raise ForeignFile(f"it was written for {versions}")
            return choices
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"ignoring {self._path}: {error}")
            return {}

    def _warn(self, message: str) -> None:
        if not self._warned:
            warnings.warning(message)
        self._warned = True


def _replace(path: Path, text: str) -> None:
    """Replace a file at once: readers find the old one or the new one."""
    temporary = path.with_name(f"{path.stem}-{uuid4().hex}.tmp")  # not by `tempfile`: others may read it
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock against other writers, or after LOCK_SECONDS none: a stuck one must not stop training."""
    with open(path, "a", opener=_without_waiting) as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while fcntl is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # a file system without locks
                break
        yield  # closing the file unlocks it


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a FIFO that nobody reads is an error, not a wait."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


_NOBODYS = "?"  # a value that nothing has: expecting it reads a key and never sets it


class KeyValueStore(Protocol):
    """The method of torch's key-value stores that choices need."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that holds `expected`, or nothing if that is empty; return what it then holds."""


class Published:
    """Choices that ranks of the same versions publish in a store; if it fails, they warn once and stop."""

    def __init__(self, store: KeyValueStore, versions: str) -> None:
        self.store = store
        self._versions = versions
        self._lost = False

    def get(self, key: str) -> Choice | None:
        """Return the choice that a rank has published, or None."""
        return self._compare_set(key, _NOBODYS, _NOBODYS)

    def put(self, key: str, choice: Choice) -> Choice:
        """Publish a choice, and return the one that all ranks take: the first that was published."""
        return self._compare_set(key, "", json.dumps(choice.as_json())) or choice

    def _compare_set(self, key: str, expected: str, desired: str) -> Choice | None:
        if self._lost:
            return None
        try:
            held = self.store.compare_set(f"tpkernels/choices/{self._versions}/{key}", expected, desired)
            return None if held.decode() == _NOBODYS else choice_of(parsed(held.decode()))
        except Exception as error:  # whatever a store raises, or holds: a choice needs none
            self._lost = True
            warnings.warning("ranks choose kernels for themselves from now on: the store says %s", error)
            return None
