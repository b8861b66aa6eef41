"""Helpers that several tests share."""

import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and text of what a call raises: what can be compared between ranks."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def open_files() -> Counter[str]:
    """What descriptors of this process refer to; sockets and pipes have numbers of their own.

    Others of the process may close theirs at any time: a leak is what `after - before` has.
    """
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return Counter(found)


def without_progress(said: str) -> str:
    """Without the lines that a command writes every so many seconds, on a slow machine."""
    return re.sub(r"^\w+ing \[[0-9/]+\] .*\n", "", said, flags=re.MULTILINE)
