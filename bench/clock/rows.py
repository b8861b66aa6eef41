"""Timings of norms that others have published, of one H100. No constant of the clock was fitted to them.

python -m bench.clock.rows

Liger-Kernel (linkedin/Liger-Kernel, commit ead96b61): `benchmark/data/all_benchmark_data.csv`, medians of
`do_bench`; 4,096 rows; a program has all columns of each. And of its backward before commit
b7025a70 what Nsight Compute said of memory's throughput: 2,048 rows, which a block on each SM takes in turn.
Kernels of ours with their blocks stand in for theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from bench.clock.predictions import built_of
from tpkernels.dispatch.recording import EntrySpec, MetaOperands
from tpkernels.gate.clock.cost import cost_of
from tpkernels.gate.clock.launch import Built, SmLaunch, launch_of
from tpkernels.gate.clock.model import Board, predict_built
from tpkernels.kernels import launch
from tpkernels.kernels.norm import layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import BlockTile

RMS = {1024: 12.16, 2048: 17.57, 4096: 29.18, 8192: 50.91, 16384: 95.01}  # bf16; columns: µs
LAYER = {1024: 18.85, 2048: 29.15, 4096: 51.04, 8192: 94.75, 16384: 184.77}  # fp32
BACKWARD = 0.6088  # of memory's peak: fp32, 2,048 rows of 4,096 columns


@dataclass(frozen=True)
class MeasuredRows:
    """A norm that was timed: a `Workload` without products."""

    kind: str  # "rms", "layer" or "rms backward"
    dtype: torch.dtype
    rows: int
    columns: int
    measured: float  # of the data sheet's bandwidth, as a share

    product = None
    shape = (0, 0, 0)
    unit = group = 1

    @property
    def name(self) -> str:
        return f"{self.kind}, {str(self.dtype).removeprefix('torch.')}, {self.rows:,} x {self.columns:,}"

    @property
    def persistent(self) -> bool:
        return self.kind == "rms backward"

    @cached_property
    def tiles(self) -> int:
        return Board().processors if self.persistent else self.rows

    @cached_property
    def traffic(self) -> int:
        return sum(one.nbytes for one in self._launch.arguments if isinstance(one, Tensor))

    @property
    def least(self) -> int:
        return 0  # a chunk of rows is cut to fit the kernel

    def on_one(self, built: Built, tiles: int, steps: int) -> SmLaunch:
        names = self._launch.constants
        values = [
            value
            for name, value in zip(self._launch.kernel.arg_names, self._launch.arguments, strict=False)
            if name not in names and not (type(value) is int and value == 1)
        ]
        grid = (1,) if self.persistent else self._launch.grid  # where rows are taken in turn, one on each SM
        return launch_of(built, values, grid, tiles, {})

    @cached_property
    def spec(self) -> EntrySpec:
        of = MetaOperands(self.rows, self.columns, self.columns, self.dtype)
        call = partial(_call, kind=self.kind, tile=self._tile)
        return EntrySpec(self.name, call, of, H100, ("sm_90",))

    @property
    def _tile(self) -> BlockTile:
        warps = 16 if self.columns >= 8192 else 8 if self.columns >= 2048 else 4
        return BlockTile(1, self.columns, warps, -(-self.rows // Board().processors))

    @cached_property
    def _launch(self) -> launch.Launch:
        return self.spec.launch()


def _call(of: MetaOperands, kind: str, tile: BlockTile) -> object:
    x, weight = of.tensor(of.tokens, of.in_features), of.tensor(of.in_features)
    if kind == "rms":
        return rms_norm_fwd(x, weight, tile=tile)
    if kind == "layer":
        return layer_norm_fwd(x, weight, weight, tile=tile)
    rstd = of.tensor(of.tokens, dtype=torch.float32)
    return rms_norm_bwd(x, x.clone(), weight, rstd, tile=tile)


def measured() -> Iterator[MeasuredRows]:
    for kind, dtype, times in (("rms", torch.bfloat16, RMS), ("layer", torch.float32, LAYER)):
        for columns, microseconds in times.items():
            moved = 2 * 4096 * columns * dtype.itemsize
            share = moved / (microseconds * 1e-6 * Board().sheet)
            yield MeasuredRows(kind, dtype, 4096, columns, share)
    yield MeasuredRows("rms backward", torch.float32, 2048, 4096, BACKWARD)


@dataclass(frozen=True, slots=True)
class JudgedRows:
    of: MeasuredRows
    fastest: float  # of the data sheet's bandwidth, as a share
    slowest: float


def judged(figures: Iterable[MeasuredRows]) -> Iterator[JudgedRows]:
    for one in figures:
        built = built_of(one.spec.entry())
        board = replace(Board(), overhead=0.0) if one.persistent else Board()  # Nsight times the kernel alone
        found = predict_built(built, one, cost_of(built, one), board)
        yield JudgedRows(one, *(one.traffic / board.sheet / each for each in (found.seconds, found.slowest)))


def table(found: Iterable[JudgedRows]) -> Iterator[str]:
    """In Markdown: shares of the data sheet's bandwidth."""
    yield "| norm | measured | model | off | model, in step | off |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        cells = [f"{share:.0%} | {share / one.of.measured - 1:+.0%}" for share in (one.fastest, one.slowest)]
        yield f"| {one.of.name} | {one.of.measured:.0%} | {' | '.join(cells)} |".replace("%", " %")


if __name__ == "__main__":
    print(*table(judged(measured())), sep="\n")
