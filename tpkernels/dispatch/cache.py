"""Choices on disk, and choices that ranks share.

A choice is a small JSON file, in a folder for each GPU and set of versions. It is written elsewhere and
renamed, so that no process reads half of one. Choices are a help, not a need: a file or a folder that cannot
be used costs one warning, and its choices are made again.

Ranks that compute the same thing must choose the same kernel, or differ in bits. They come to a shape at
different moments, or never, so no collective can settle it. The first rank to decide publishes its choice in
a key-value store, where the first value under a key stays; all others take it (`Published`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch

from tpkernels.dispatch.log import warnings
from tpkernels.files import make_folder, parsed, read_own

FORMAT = 2  # 1 was one file for all choices, made with fewer rounds and beside collectives
KERNELS = Path(__file__).parents[1] / "kernels"
_NO_VALUE = "?"  # that no key has: expecting it reads a key and never sets it


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that choices depend on; under other versions they do not count."""

    gpu: str
    torch: str  # with the CUDA version behind it: "2.11.0+cu130"
    triton: str
    kernels: str  # hash of our kernels' source

    @property
    def slug(self) -> str:
        """The versions as a folder name."""
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
    """The name of the candidate that computes a shape, or of the way that moves rows, and why."""

    name: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    captured: str = ""  # in a captured graph; "": the same
    company: str = ""  # what else ran while it was timed: it is made again
    source: str = field(default="timed", compare=False)  # of this process

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.captured) if self.captured else (self.name,)

    def __str__(self) -> str:
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        reasons = self.source + ": " * bool(times) + ", ".join(f"{name} {ms:.4g} ms" for name, ms in times)
        also = f", in captured graphs {self.captured}" if self.captured else ""
        return f"{self.name}{also} ({reasons}{f'; beside {self.company}' if self.company else ''})"

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "source"}


def choice_of(entry: Any, source: str) -> Choice:
    """Return the choice in a JSON value; ValueError if it is none."""
    with suppress(TypeError, ValueError, OverflowError, KeyError, AttributeError):
        times = {str(name): float(value) for name, value in entry["milliseconds"].items()}
        name, captured, company = entry["name"], entry["captured"], entry["company"]
        if all(isinstance(word, str) for word in (name, captured, company)):
            return Choice(name, times, captured, company, source)
    raise ValueError(f"{entry!r:.60} is not a choice")


class Cache:
    """The choices of one set of versions; in memory alone if `folder` is None or cannot be used."""

    def __init__(self, folder: Path | None, versions: Versions) -> None:
        self.versions = versions
        self._folder = folder and folder / versions.slug
        self._choices: dict[str, Choice] = {}
        self._warned = False
        if folder and self._folder and not self._folder.exists():
            others = sorted(path.name for path in folder.glob(f"{gpu_slug(versions.gpu)}_torch-*"))
            if others:  # after an update shapes are timed anew, and nobody need wonder why
                warnings.warning(
                    "%s does not count, as this is %s: shapes are timed again, and you may delete it",
                    *(folder / others[-1], versions.slug),
                )

    @property
    def choices(self) -> Mapping[str, Choice]:
        """Those that this process has made or read."""
        return self._choices

    def path_of(self, key: str) -> Path | None:
        return self._folder and self._folder / f"{key.replace('/', '_')}.json"

    def get(self, key: str) -> Choice | None:
        path = self.path_of(key)
        if key not in self._choices and path is not None:
            try:
                content = parsed(read_own(path, path.parents[1]))
                expected = self._content(key)
                found = {name: content[name] for name in expected}
                if found != expected:
                    raise ValueError(f"it is of {found}")
                self._choices[key] = choice_of(content["choice"], "cached")
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._warn(f"ignoring {path}: {error}")
        return self._choices.get(key)

    def put(self, key: str, choice: Choice) -> None:
        """Keep a choice, in memory and on disk."""
        self._choices[key] = choice
        path = self.path_of(key)
        if path is None:
            return
        content = {**self._content(key), "choice": choice.as_json()}
        temporary = path.with_name(f"{uuid4().hex}.tmp")  # not by `tempfile`: others may read it
        try:
            make_folder(path.parent)
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            temporary.chmod(temporary.stat().st_mode & ~0o022)  # what others can write is not read again
            os.replace(temporary, path)
        except OSError as error:
            self._warn(f"cannot write {path} ({error}): choices live as long as this process")
            self._folder = None
            with suppress(OSError):
                temporary.unlink()

    def _content(self, key: str) -> dict[str, object]:
        """Return what the file of a key holds beside its choice."""
        return {"format": FORMAT, "versions": asdict(self.versions), "key": key}

    def _warn(self, message: str) -> None:
        if not self._warned:
            warnings.warning(message)
        self._warned = True


class KeyValueStore(Protocol):
    """The method of torch's key-value stores that choices need."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that holds `expected`, or nothing if that is empty; return what it then holds."""


class Published:
    """Choices that ranks of the same versions publish in a store; if it fails, they warn once and stop."""

    def __init__(self, store: KeyValueStore, versions: Versions) -> None:
        self.store = store
        self._versions = versions.slug
        self._lost = False

    def get(self, key: str) -> Choice | None:
        """Return the choice that a rank has published, or None."""
        return self._compare_set(key, _NO_VALUE, _NO_VALUE)

    def put(self, key: str, choice: Choice) -> Choice:
        """Publish a choice, and return the one that all ranks take: the first that was published."""
        return self._compare_set(key, "", json.dumps(choice.as_json())) or choice

    def _compare_set(self, key: str, expected: str, desired: str) -> Choice | None:
        if self._lost:
            return None
        try:
            held = self.store.compare_set(
                f"tpkernels/choices/{self._versions}/{key}", expected, desired
            ).decode()
            return None if held == _NO_VALUE else choice_of(parsed(held), "agreed")
        except Exception as error:  # whatever a store raises, or holds: a choice needs none
            self._lost = True
            warnings.warning("ranks choose kernels for themselves from now on: the store says %s", error)
            return None
