"""`--size NAME=VALUE`, as commands that know models take it."""

from __future__ import annotations

import json
from typing import Any


def size_of(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--size: expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a word, such as swiglu
