"""Helpers that several tests share."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tpkernels.kernels.target import Target


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


def needs_of(item: pytest.Item) -> set[str]:
    """What a test needs of a GPU: by its marks, the form of its kernel, and its op."""
    needs = {need for mark in item.iter_markers("needs") for need in mark.args}
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("form") == "descriptor":
        needs.add("descriptors")
    if "quantize" in getattr(
        getattr(params.get("case"), "op", None), "keywords", ()
    ):  # see `tests.ops.cases`
        needs.add("fp8")
    return needs


def lacking(needs: Iterable[str], target: Target) -> str | None:
    """Why a test cannot run on a GPU; None if it can."""
    from tpkernels.kernels.target import fp8_obstacle

    for need in sorted(needs):
        match need:
            case "fp8" if obstacle := fp8_obstacle(target):
                return f"needs a GPU that multiplies fp8, got {obstacle}"
            case "descriptors" if not target.has_tma:
                return "needs a GPU with a tensor memory accelerator"
            case "fp8" | "descriptors":
                continue
            case _:
                raise ValueError(f"expected needs of fp8 and descriptors, got {need!r}")
    return None
