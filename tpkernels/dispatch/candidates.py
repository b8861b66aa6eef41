"""Lists the candidates for a primitive on a GPU: torch, its fused operators, our kernels with each tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.record import Library, P, Primitive, R, copied_into
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import DTYPES, FP8, Form, choose_form
from tpkernels.kernels.target import (
    A100,
    B200,
    H100,
    L40S,
    MI300,
    Target,
    fp8_obstacle,
    target_of,
)
from tpkernels.kernels.tiles import candidates as shipped_tiles
from tpkernels.kernels.tiles import serves
from tpkernels.planning import gpus


@dataclass(frozen=True, slots=True)
class TargetGpu(gpus.Gpu):
    """A model of GPU and its compile target. It is a value: choices can be made without such a GPU."""

    target: Target


_TARGETS = {
    "a100": A100,
    "l40s": L40S,
    "h100": H100,
    "h200": H100,
    "b200": B200,
    "mi300x": MI300,
}
TARGET_GPUS: Mapping[str, TargetGpu] = {
    key: TargetGpu(gpus.GPUS[key].name, target) for key, target in _TARGETS.items()
}


def gpu_of(device: torch.device) -> TargetGpu:
    """Return the model of a device; in a process that interprets kernels the CPU stands in for a GPU."""
    target = target_of(device)
    if target.backend == "interpreter":
        return TargetGpu("interpreter", target)
    return TargetGpu(torch.cuda.get_device_name(device), target)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a primitive, under a name that files and logs know it by."""

    name: str
    tile: MatmulTile | None = None  # of our kernel, in this form; neither for torch
    form: Form | None = None

    def bind(self, record: Primitive[P, R]) -> Callable[P, R]:
        """Return the function that computes the primitive in this way."""
        if self.tile is not None:
            return partial(record.by_kernel, tile=self.tile, form=self.form)
        if self == TORCH:
            return record.by_torch
        return self._library(record).run

    def bind_into(self, record: Primitive[..., Any]) -> Callable[..., object]:
        """Return the function that computes the primitive in this way, into its first argument."""
        if self.tile is not None:
            return lambda out, *args: record.by_kernel(*args, out=out, tile=self.tile, form=self.form)
        into = record.into if self == TORCH else self._library(record).into
        return into or partial(copied_into, self.bind(record))

    def _library(self, record: Primitive[..., Any]) -> Library:
        return next(library for library in record.library if library.name == self.name)


TORCH = Candidate("torch")
FEW_TURNS = 2  # of all processors: with more, sums of parts cost more than a last turn that is not full
LEAST_STEPS = 8  # of each part of a depth, so that filling and emptying the pipeline stays cheap
BLOCK_BYTES = 1024  # of shared memory that CUDA takes for each block
BUSY_TURNS = 4  # of all processors: a smaller tile could save a part of the last of them, and loses more


def candidates(record: Primitive[..., Any], problem: Problem, gpu: TargetGpu) -> tuple[Candidate, ...]:
    """List what may be worth timing, plain torch first. Names are unique and do not change between runs."""
    if problem.empty:  # nothing to win
        return (TORCH,)
    fused = (Candidate(library.name) for library in record.library if library.fits(problem, gpu.target))
    return TORCH, *fused, *_ours(problem, gpu)


def forms_of(problem: Problem, gpu: TargetGpu) -> tuple[Form, ...]:
    """Return the forms in which our kernels can compute a problem; none if they cannot."""
    dtypes = DTYPES if problem.step != "scaled_linear" else FP8
    if problem.empty or problem.dtype not in dtypes or find_spec("triton") is None:
        return ()
    if problem.dtype in FP8 and (fp8_obstacle(gpu.target) or problem.result not in DTYPES):
        return ()
    if choose_form(gpu.target, problem.dtype, problem.layouts) == "descriptor":
        return "descriptor", "pointer"
    return ("pointer",)  # serves everything, and is lighter to launch


def _fits(problem: Problem, form: Form, tile: MatmulTile, target: Target) -> bool:
    """Whether a tile computes a problem, as far as that is known without compiling it."""
    taken, held = shared_memory(problem, form, tile), target.shared_memory
    fits = tile.per_processor * (taken + BLOCK_BYTES) <= held + BLOCK_BYTES
    return fits and serves(problem.kernel, tile, problem.options)


def shared_memory(problem: Problem, form: Form, tile: MatmulTile) -> int:
    """Bytes that a block takes, but for some for barriers and alignment.

    Operands in flight, and of a descriptor kernel one part of a result on its way to or from memory; a
    flattened loop that also reads in its epilogue keeps apart what it reads and what it writes.
    """
    cols = tile.block_cols * (2 if problem.kernel == "glu" else 1)
    operands = tile.num_stages * (tile.block_rows + cols) * tile.block_depth * problem.dtype.itemsize
    if form == "pointer":
        return operands
    in_fp32 = tile.splits > 1 or problem.options == ("float32",)  # slots, or a main_grad
    adds = problem.step == "wgrad_accumulate_" and not in_fp32  # else the copy engine does
    parts = 2 if tile.flatten and (adds or problem.step in ("dgrad_act", "dglu")) else 1
    return operands + parts * tile.block_rows * (tile.block_cols // tile.parts) * (
        4 if in_fp32 else problem.result.itemsize
    )


def _ours(problem: Problem, gpu: TargetGpu) -> Iterator[Candidate]:
    ragged = any(layout.tma_obstacle() for layout in problem.layouts)
    for form in forms_of(problem, gpu):
        shipped = shipped_tiles(problem.kernel, form, problem.dtype, gpu.target, ragged)
        tiles = [tile for tile in shipped if _fits(problem, form, tile, gpu.target)]
        for tile in tiles:
            useless = (
                _oversized(tile, tiles, problem)
                or _undersized(tile, tiles, problem, gpu)
                or _needless_split(tile, tiles, problem, gpu)
            )
            if not useless:
                yield Candidate(f"triton/{form}/{tile.name}", tile, form)


def _oversized(tile: MatmulTile, tiles: Sequence[MatmulTile], problem: Problem) -> bool:
    """Whether half of this tile's rows would cover the result, and a lower tile is there to do so."""
    lower = any(other.block_rows < tile.block_rows for other in tiles)
    return lower and problem.product[0] * 2 <= tile.block_rows


def _undersized(tile: MatmulTile, tiles: Sequence[MatmulTile], problem: Problem, gpu: TargetGpu) -> bool:
    """Whether a tile of four times the area keeps every processor busy for BUSY_TURNS already."""
    return any(
        other.block_rows * other.block_cols >= 4 * tile.block_rows * tile.block_cols
        and other.tiles(*problem.product) >= BUSY_TURNS * gpu.target.processors
        for other in tiles
    )


def _needless_split(tile: MatmulTile, tiles: Sequence[MatmulTile], problem: Problem, gpu: TargetGpu) -> bool:
    """Whether cutting the depth saves no turn of the processors, or makes parts of few steps."""
    programs = gpu.target.processors * tile.per_processor
    count = tile.tiles(*problem.product)

    def turns(splits: int) -> float:
        return -(-count * splits // programs) / splits

    return tile.splits > 1 and (
        count >= FEW_TURNS * programs
        or problem.depth < LEAST_STEPS * tile.splits * tile.block_depth
        or any(
            other.splits < tile.splits and turns(other.splits) <= turns(tile.splits)
            for other in tiles
            if replace(tile, splits=other.splits) == other
        )
    )
