"""SHA-256 sums of a checkpoint's files, in a file beside them: a damaged file is an error.

`sha256sum --check SHA256SUMS` in the checkpoint's folder checks them without this package.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable
from pathlib import Path

from tpkernels.files import read_bytes, replace_text

SUMS = "SHA256SUMS"
_AT_ONCE = 1 << 20  # bytes: enough that the calls themselves cost nothing


def sums_of_own(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """The sums of this rank's files by name; each file belongs to one rank."""
    names = [path.name for path in folder.iterdir()]
    return {name: _sum(folder / name) for name in names if _is_ours(name, rank, ranks)}


def write(folder: Path, sums: dict[str, str]) -> None:
    replace_text(folder / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def intact_files(folder: Path, rank: int, ranks: int) -> set[str] | None:
    """Check the sums of this rank's files; return the names of all files, None if there are no sums."""
    try:
        text = read_bytes(folder / SUMS).decode(errors="replace")
    except FileNotFoundError:  # an old checkpoint
        return None
    sums = _parsed(folder, text)
    for name, expected in sums.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing; {_CURE}")
        if _is_ours(name, rank, ranks) and (found := _sum(folder / name)) != expected:
            raise ValueError(f"{folder / name} is damaged: expected SHA-256 {expected}, got {found}; {_CURE}")
    return set(sums)


def require_sums(folder: Path, needed: Iterable[str], summed: Container[str]) -> None:
    """Raise if a file that will be read has no sum."""
    for name in needed:
        if name not in summed:
            raise ValueError(f"{folder / SUMS} is damaged: it has no sum of {name}; {_CURE}")


_CURE = "restore it from a copy, or go on from an earlier checkpoint by writing its name into `latest`"


def _parsed(folder: Path, text: str) -> dict[str, str]:
    sums = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/\\\0]+)", line)
        if match is None:
            raise ValueError(f"{folder / SUMS} is damaged in line {number}; {_CURE}")
        sums[match[2]] = match[1]
    return sums


def _is_ours(name: str, rank: int, ranks: int) -> bool:
    """A file that torch named after a rank is that rank's, modulo the ranks now; other files are rank 0's."""
    match = re.match(r"__(\d+)_", name)
    return (int(match[1]) if match else 0) % ranks == rank


def _sum(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
