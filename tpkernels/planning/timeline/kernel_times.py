"""How long kernels run: products by waves of tiles, everything else by its bytes.

A processor (SM) computes its tiles one after the other. Of a tile it takes `edge` cycles, and `step` cycles
for each step of depth; a launch takes `start` cycles beside. So many cycles are counted by the clock of
kernels (`python -m tpkernels clock KERNEL`) for a compiled one; `usual_cycles` stands for kernels without a
count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tpkernels.gpus import RatedGpu


class KernelTimes(Protocol):
    """Seconds of kernels that nothing holds up."""

    def product(self, kernel: str, rows: int, cols: int, depth: int, left_free: int = 0) -> float:
        """kernel: as `kernels.tiles` names it; rows, cols and depth of what it computes

        left_free: processors that it does not use
        """

    def streamed(self, traffic: float) -> float:
        """A kernel that reads and writes so many bytes, and computes next to nothing."""


@dataclass(frozen=True, slots=True)
class TileSizes:
    """As much of a product as one processor computes at once."""

    rows: int
    cols: int
    depth: int


@dataclass(frozen=True, slots=True)
class Cycles:
    """Of a kernel on one processor."""

    step: float  # a step of depth
    edge: float  # a tile beyond its steps
    start: float  # a launch beyond its tiles


# As `kernels.tiles` lists them for `linear`: from the fastest to the one that splits small results the most.
TILES = (TileSizes(128, 256, 64), TileSizes(128, 128, 64), TileSizes(64, 128, 64))
_FLOPS_A_CYCLE = 4096  # of the tensor cores of one processor of an H100, dense bf16: data sheet
_H100_RATE = 989e12 / 132  # of one processor: others are as much slower or faster as their data sheets say


def usual_cycles(kernel: str, tile: TileSizes, asking: float = 1.0) -> Cycles:
    """What kernels of ours come to by the count of their machine code, within some percent.

    The tensor cores are busy 95 % of a step at most, or operands come too slowly: 40 bytes a cycle from the
    L2 where all processors ask, 64 where few do. An edge is what `linear` takes to fill its stages and to
    store.

    asking: the share of processors that have a tile
    """
    ideal = 2 * tile.rows * tile.cols * tile.depth / _FLOPS_A_CYCLE
    operands = 2 * (tile.rows + tile.cols) * tile.depth
    step = max(ideal / 0.95, operands * max(asking / 40, 1 / 64))
    return Cycles(step, edge=3700 * tile.rows * tile.cols / (128 * 256), start=1500)


CyclesOf = Callable[
    [str, TileSizes, float], Cycles
]  # of a kernel and tile, where so many processors have one


@dataclass(frozen=True, slots=True)
class TiledTimes:
    """Products in waves, at the clock that power allows.

    power_clock: Hz with all tensor cores busy. Power goes with f V², and V with f, so that a kernel which
        keeps them busy for a part of the time runs at power_clock * part^(-1/3), up to `boost`. Boards
        differ: published times of one product lie 20 % apart.
    """

    gpu: RatedGpu
    cycles: CyclesOf = usual_cycles
    power_clock: float = 1.45e9
    boost: float = 1.98e9  # H100 SXM: nvidia-smi -q -d CLOCK
    memory_share: float = 0.9  # of the data sheet's bytes a second
    launch: float = 2e-6  # from one kernel to the next in a stream

    def product(self, kernel: str, rows: int, cols: int, depth: int, left_free: int = 0) -> float:
        if not (rows and cols and depth):
            return 0.0
        processors, tile = self.gpu.processors, _tile_for(rows, cols, self.gpu.processors)
        steps, tiles = -(-depth // tile.depth), -(-rows // tile.rows) * -(-cols // tile.cols)
        cycles = self.cycles(kernel, tile, min(1.0, tiles / processors))
        on_busiest = -(-tiles // (processors - left_free))
        total = cycles.start + on_busiest * (cycles.edge + steps * cycles.step)
        ideal = 2 * tile.rows * tile.cols * tile.depth / _FLOPS_A_CYCLE
        busy = ideal * steps * tiles / processors / total
        computing = total / self.clock(busy) * _H100_RATE / (self.gpu.flops / processors)
        traffic = 2.0 * (rows * depth + cols * depth + rows * cols)
        return self.launch + max(computing, traffic / self._bytes_a_second)

    def streamed(self, traffic: float) -> float:
        return self.launch + traffic / self._bytes_a_second

    def clock(self, busy: float) -> float:
        """Hz, where tensor cores are busy for this part of the time."""
        return min(self.boost, self.power_clock * float(max(busy, 0.05) ** (-1 / 3)))

    @property
    def _bytes_a_second(self) -> float:
        return self.gpu.bytes * self.memory_share


def _tile_for(rows: int, cols: int, processors: int) -> TileSizes:
    """The first that occupies every processor, else the one that occupies the most."""

    def count(tile: TileSizes) -> int:
        return -(-rows // tile.rows) * -(-cols // tile.cols)

    return next((tile for tile in TILES if count(tile) >= processors), max(TILES, key=count))
