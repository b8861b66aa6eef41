"""A kernel as the clock launches it: at the sizes of its table, or a few tiles on one SM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.gate.clock.launch import Built, SmLaunch, launch_of
from tpkernels.gate.clock.workload import Product
from tpkernels.gate.user_kernels.entries import dtype_of, passed
from tpkernels.gate.user_kernels.record import OwnKernel, Values


@dataclass(frozen=True)
class OwnWorkload:
    """A workload, see `gate.clock.workload`, and what names it in the cache, see `gate.clocking`."""

    own: OwnKernel
    arguments: tuple[str, ...]  # that are not compiled in, in order
    unit: int = 1
    group: int = 1

    def text(self) -> str:
        return repr(self)

    def workload(self) -> OwnWorkload:
        return self

    @property
    def name(self) -> str:
        return self.own.name

    @cached_property
    def product(self) -> Product | None:
        if not self.own.tile:
            return None
        rows, cols, depth = self.own.blocks.values()
        operand = next(iter(self.own.tensors.values()))
        return Product(rows, cols, depth, dtype_of(operand.dtype).itemsize)

    @property
    def shape(self) -> tuple[int, int, int]:
        if not self.own.tile:
            return 0, 0, 0
        rows, cols, depth = (self.own.sizes[name] for name in self.own.blocks)
        return rows, cols, depth

    @property
    def tiles(self) -> int:
        if self.product is None:
            return prod(self._values.grid)
        rows, cols, _ = self.shape
        return -(-rows // self.product.rows) * -(-cols // self.product.cols)

    @property
    def traffic(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(self._values).values())

    @property
    def least(self) -> int:
        return 0  # a kernel of others may leave parts of its tensors alone

    @property
    def persistent(self) -> bool:
        """Whether the grid asks how many processors there are."""
        return self.own.at(self.own.sizes, processors=1).grid != self._values.grid

    def on_one(self, built: Built, tiles: int, steps: int) -> SmLaunch:
        if not self.own.tile:
            return launch_of(built, list(self._passed(self._values)), self._values.grid, tiles)
        values = self.own.at(self.own.of_tiles(tiles, steps), processors=1)
        return launch_of(built, list(self._passed(values)), values.grid)

    @cached_property
    def _values(self) -> Values:
        return self.own.at(self.own.sizes)

    def _tensors(self, values: Values) -> dict[str, Tensor]:
        return {
            name: torch.empty_strided(
                values.shapes[name], values.strides[name], dtype=dtype_of(kind.dtype), device="meta"
            )
            for name, kind in self.own.tensors.items()
        }

    def _passed(self, values: Values) -> Iterator[Tensor | TensorDescriptor | int | float]:
        tensors = self._tensors(values)
        for name in self.arguments:
            yield passed(self.own, name, tensors[name]) if name in tensors else values.numbers[name]
