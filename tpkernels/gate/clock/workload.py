"""How much of a kernel's work a launch is, and how less of it is launched on one SM to take its cycles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tpkernels.gate.clock.launch import Built, SmLaunch


@dataclass(frozen=True, slots=True)
class Product:
    """How a product is cut: tiles of a result, each of them computed in steps of depth."""

    rows: int  # of a tile
    cols: int
    depth: int  # of a step
    itemsize: int = 2  # bytes of an element of the operands
    weights: int = 1  # 2 for a gated unit, which multiplies a block of rows by two
    pairs: int = 1  # of matrices whose products are summed
    beside: int = 0  # bytes that a step may load beside its operands, at most: scales

    @property
    def flops(self) -> int:
        """Of a step."""
        return 2 * self.rows * self.cols * self.depth * self.weights * self.pairs

    @property
    def bytes(self) -> int:
        """Of the operands of a step."""
        return (self.rows + self.cols * self.weights) * self.depth * self.itemsize * self.pairs


class Workload(Protocol):
    """A launch on a whole GPU."""

    @property
    def name(self) -> str: ...
    @property
    def product(self) -> Product | None: ...  # None: no products in steps; then a tile is a block
    @property
    def shape(self) -> tuple[int, int, int]: ...  # rows, columns, depth of the product; without one (0, 0, 0)
    @property
    def tiles(self) -> int: ...
    @property
    def traffic(self) -> int: ...  # bytes of all tensors, each once
    @property
    def least(self) -> int: ...  # bytes that a launch moves in any case; 0: not known
    @property
    def unit(self) -> int: ...  # tiles that `on_one` takes multiples of
    @property
    def persistent(self) -> bool: ...  # whether each block has a fixed share of the tiles
    @property
    def group(self) -> int: ...  # tiles of a column that are computed in a row

    def on_one(self, built: Built, tiles: int, steps: int) -> SmLaunch:
        """So many tiles of so many steps on one SM."""
