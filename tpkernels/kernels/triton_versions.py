"""What differs between the versions of Triton that are allowed, and what no version may choose for us."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

GLUON_SINCE = (3, 7)  # earlier ones lack parts of Gluon that our kernels are written in
# 3.7 takes such kernels, and has a block arrive at its own barrier instead of the other's
PAIRS_SINCE = (3, 9)
# Earlier ones cannot give gated units warps of their own (`MatmulTile.specialize`): their compiler stops.
SPECIALIZED_SINCE = (3, 7)
# Options of every launch and compilation of ours. A product and a sum may become one instruction, which
# rounds once: Triton's default until 3.9, which warns that it ends with 3.10.
LAUNCH_OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": True}
# from this version on: kernel, tile -> epilogues with which it has too few registers, and spills
SPILLING_SINCE: Mapping[tuple[int, int], Mapping[tuple[str, str], tuple[str, ...]]] = {
    (3, 9): {("dgrad", "128x128x64-w4-s4-p4-c2"): ("gelu",)},
}
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


def spilling(kernel: str, tile: str) -> tuple[str, ...]:
    """The epilogues with which a tile spills in the Triton that is installed, and not in all."""
    found = (of.get((kernel, tile), ()) for since, of in SPILLING_SINCE.items() if triton_version() >= since)
    return tuple(option for options in found for option in options)


def replacement(kernel: str, tile: str) -> str:
    """The tile that the installed Triton is to compile in place of this one: itself, unless it spills."""
    found = (of.get((kernel, tile)) for since, of in REPLACED_SINCE.items() if triton_version() >= since)
    return next((name for name in found if name), tile)


def gluon_copies() -> tuple[Any, Any, Any]:
    """Gluon's `tma.async_load`, `async_store` and `async_atomic_add`, as 3.8 calls them.

    3.9 has the older names no more; 3.7 has no name for the last, though its compiler knows it.
    """
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if hasattr(tma, "async_load"):
        return tma.async_load, tma.async_store, tma.async_atomic_add
    return tma.async_copy_global_to_shared, tma.async_copy_shared_to_global, _async_atomic_add(tma.__name__)


def _async_atomic_add(module: str) -> Any:
    """What 3.7 lacks, to be found where 3.8 has it."""
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    def async_atomic_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        where = _semantic._convert_to_ir_values(coord, require_i64=False)
        add = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, where, src.handle)

    async_atomic_add.__module__ = module
    return builtin(async_atomic_add)
