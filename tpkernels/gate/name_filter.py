"""What `check --only NAME` means: a name is a path, and NAME some of its parts, whole and in a row."""

from __future__ import annotations

from fnmatch import fnmatchcase


def has_parts(name: str, wanted: str) -> bool:
    """Whether `wanted` is in `name` between slashes; `*` stands for anything, "" is in every name.

    >>> has_parts("gfx942/linear/pointer/bf16", "linear/pointer")
    True
    >>> has_parts("gather_linear/pointer/bf16", "linear"), has_parts("gather_linear/pointer/bf16", "*linear")
    (False, True)
    """
    wanted = wanted.strip("/")
    return not wanted or fnmatchcase(f"/{name}/", f"*/{wanted}/*")
