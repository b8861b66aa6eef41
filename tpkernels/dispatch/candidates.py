"""Who could compute a primitive: torch, its fused operators, our kernels with each shipped tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from tpkernels.dispatch.gpus import Gpu
from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.record import Library, P, Primitive, R, copied_into
from tpkernels.kernels.footprints import least_shared_memory
from tpkernels.kernels.operands import DTYPES, Form, choose_form
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.tiles import candidates as shipped_tiles


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a primitive, under a name that files and logs know it by."""

    name: str
    tile: MatmulTile | None = None  # of our kernel, in this form; neither for torch
    form: Form | None = None

    def bind(self, record: Primitive[P, R]) -> Callable[P, R]:
        """The function that computes the primitive so."""
        if self.tile is not None:
            return partial(record.by_kernel, tile=self.tile, form=self.form)
        if self == TORCH:
            return record.by_torch
        return self._library(record).run

    def bind_into(self, record: Primitive[..., Any]) -> Callable[..., object]:
        """The function that computes the primitive so, into its first argument."""
        if self.tile is not None:
            return lambda out, *args: record.by_kernel(*args, out=out, tile=self.tile, form=self.form)
        into = record.into if self == TORCH else self._library(record).into
        return into or partial(copied_into, self.bind(record))

    def _library(self, record: Primitive[..., Any]) -> Library:
        return next(library for library in record.library if library.name == self.name)


TORCH = Candidate("torch")
BUSY_TURNS = 4  # of all processors: a smaller tile could save a part of the last of them, and loses more


def candidates(record: Primitive[..., Any], problem: Problem, gpu: Gpu) -> tuple[Candidate, ...]:
    """All that may be worth timing, plain torch first. Names are unique and do not change between runs."""
    if problem.empty:  # nothing to win
        return (TORCH,)
    fused = (Candidate(library.name) for library in record.library if library.fits(problem, gpu.target))
    return TORCH, *fused, *_ours(problem, gpu)


def _ours(problem: Problem, gpu: Gpu) -> Iterator[Candidate]:
    if problem.dtype not in DTYPES or find_spec("triton") is None:
        return
    forms: tuple[Form, ...] = ("pointer",)  # serves everything, and is lighter to launch
    if choose_form(gpu.target, problem.dtype, problem.layouts) == "descriptor":
        forms = ("descriptor", "pointer")
    ragged = any(layout.tma_obstacle() for layout in problem.layouts)
    for form in forms:
        tiles = shipped_tiles(problem.kernel, form, problem.dtype, gpu.target, ragged)
        for tile in tiles:
            fits = least_shared_memory(problem.kernel, form, problem.dtype, tile) <= gpu.shared_memory
            if fits and not _oversized(tile, tiles, problem) and not _undersized(tile, tiles, problem, gpu):
                yield Candidate(f"triton/{form}/{tile.name}", tile, form)


def _oversized(tile: MatmulTile, tiles: tuple[MatmulTile, ...], problem: Problem) -> bool:
    """Whether half of this tile's rows would cover the result, and a lower tile is there to do so."""
    lower = any(other.block_rows < tile.block_rows for other in tiles)
    return lower and problem.product[0] * 2 <= tile.block_rows


def _undersized(tile: MatmulTile, tiles: tuple[MatmulTile, ...], problem: Problem, gpu: Gpu) -> bool:
    """Whether a tile of four times the area keeps every processor busy for BUSY_TURNS already."""
    return any(
        other.block_rows * other.block_cols >= 4 * tile.block_rows * tile.block_cols
        and other.tiles(*problem.product) >= BUSY_TURNS * gpu.target.processors
        for other in tiles
    )
