"""Environment variables that are on or off."""

from __future__ import annotations

import os


def env_flag(name: str, default: bool) -> bool:
    """Whether the variable is 1; ValueError for a value other than 0 and 1, which is never ignored."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}; expected 0 or 1")
    return value == "1" if value else default
