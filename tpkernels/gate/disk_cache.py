"""A folder of small JSON values among the user's caches: what is costly to learn twice.

Any number of processes may share it. A file is written elsewhere and renamed, so that none is ever seen half
written. A file that cannot be read, does not hold what was written, or can have been written by other users,
counts as absent; so does the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tpkernels.files import cache_folder, make_folder, parsed, read_own


class DiskCache:
    """Keeps JSON values in `folder`; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @staticmethod
    def of_user(purpose: str) -> DiskCache:
        """The cache for one purpose, where the user's caches are."""
        folder = cache_folder()
        return DiskCache(folder and folder / purpose)

    def get(self, key: str) -> Any | None:
        """What was put under the key; None if nothing was, or if it is damaged."""
        if self.folder is None:
            return None
        try:
            stored = parsed(read_own(_path(self.folder, key), self.folder))
            value = stored["value"]
            return value if stored["digest"] == _digest(key, value) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value; where the folder cannot be written to, nothing is kept."""
        if self.folder is None:
            return
        text = json.dumps({"digest": _digest(key, value), "value": value})
        try:
            make_folder(self.folder)
            with NamedTemporaryFile(
                "w", dir=self.folder, suffix=".part", delete=False, encoding="utf-8"
            ) as file:
                file.write(text)
            os.replace(file.name, _path(self.folder, key))
        except OSError:
            return


def _path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _digest(key: str, value: Any) -> str:
    return hashlib.sha256(f"{key}\n{json.dumps(value, sort_keys=True)}".encode()).hexdigest()
