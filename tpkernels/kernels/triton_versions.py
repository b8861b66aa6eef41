"""What differs between the versions of Triton that are allowed, and what no version may choose for us."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Options of every launch and compilation of ours. A product and a sum may become one instruction, which
# rounds once: Triton's default until 3.9, which warns that it ends with 3.10.
LAUNCH_OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": True}
# from this version on: kernel, tile that would spill on sm_90 -> the tile that is compiled in its place
REPLACED_SINCE: Mapping[tuple[int, int], Mapping[tuple[str, str], str]] = {
    (3, 8): {("dgrad_pairs", "16x64x16-w4-s3-p1"): "16x64x16-w4-s2-p1"},
    (3, 9): {
        ("linear", "64x64x16-w8-s3-p1"): "64x64x16-w8-s2-p1",
        ("glu", "64x128x64-w4-s3-p2"): "64x128x64-w4-s4-p2",
        ("glu", "16x64x64-w4-s3-p1"): "16x64x64-w4-s2-p1",
        ("dgrad_pairs", "16x64x32-w4-s2-p1"): "16x64x32-w8-s2-p1",
    },
}


@cache
def triton_version() -> tuple[int, int]:
    """(3, 7) of 3.7.1; (0, 0) without Triton."""
    try:
        major, minor = version("triton").split(".")[:2]
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return 0, 0


def replacement(kernel: str, tile: str) -> str:
    """The tile that the installed Triton is to compile in place of this one: itself, unless it spills."""
    found = (of.get((kernel, tile)) for since, of in REPLACED_SINCE.items() if triton_version() >= since)
    return next((name for name in found if name), tile)
