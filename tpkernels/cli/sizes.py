"""`--size NAME=VALUE` and numbers of ranks, as commands that know models take them."""

from __future__ import annotations

from typing import Any

from tpkernels.files import parsed

MOST_RANKS = 10_000_000  # more than any machine has, and described in seconds


def require_ranks(option: str, count: int) -> None:
    if count > MOST_RANKS:
        raise ValueError(f"{option}: expected at most {MOST_RANKS}, got {count}")


def size_of(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--size: expected NAME=VALUE, got {text!r}")
    try:
        return name, parsed(value)
    except ValueError:
        return name, value  # a word, such as swiglu
