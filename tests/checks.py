"""Helpers that several tests share."""

import re
from collections.abc import Callable
from typing import Any


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and text of what a call raises: what can be compared between ranks."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def without_progress(said: str) -> str:
    """Without the lines that a command writes every so many seconds, on a slow machine."""
    return re.sub(r"^\w+ing \[[0-9/]+\] .*\n", "", said, flags=re.MULTILINE)
