"""Choices that ranks have alike: the first to decide publishes, and all others take what is there.

Ranks time for themselves, and two that compute the same thing twice could do so by different kernels and
differ in bits. They come to a problem at different moments, or never, so no collective can settle it: a
key-value store does, in which the first value under a key stays.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Protocol

from tpkernels.dispatch.cache import Choice, choice_of
from tpkernels.dispatch.log import warnings
from tpkernels.files import parsed

_NOBODYS = "?"  # a value that nothing has: expecting it reads a key and never sets it


class Store(Protocol):
    """What is used of torch's stores."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that holds what is expected, or is absent where nothing is; returns what it holds now."""


class Published:
    """What ranks under the same versions have published. A store that fails is warned of once, and left."""

    def __init__(self, store: Store, versions: str) -> None:
        self.store = store
        self._versions = versions
        self._lost = False

    def get(self, key: str) -> Choice | None:
        """What somebody has published."""
        return self._compare_set(key, _NOBODYS, _NOBODYS)

    def put(self, key: str, choice: Choice) -> Choice:
        """What all ranks take: this, unless somebody was first."""
        return self._compare_set(key, "", json.dumps(asdict(choice))) or choice

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
