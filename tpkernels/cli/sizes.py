"""`--size NAME=VALUE`, as commands that know models take it."""

from __future__ import annotations

from typing import Any

from tpkernels.files import parsed


def size_of(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--size: expected NAME=VALUE, got {text!r}")
    try:
        return name, parsed(value)
    except ValueError:
        return name, value  # a word, such as swiglu
