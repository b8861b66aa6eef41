"""How a kernel of others is launched for the clock: as its table says, or in few tiles on one SM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.gate.clock.launch import Built, Launch, launch_of
from tpkernels.gate.clock.workload import Product, Workload
from tpkernels.gate.own.record import DTYPES, OwnKernel, Values


@dataclass(frozen=True, slots=True)
class OwnLaunching:
    """See `gate.clocking`."""

    own: OwnKernel
    arguments: tuple[str, ...]  # that are not compiled in, in order

    def text(self) -> str:
        return repr(self)

    def of(self, built: Built) -> Workload:
        own = self.own
        values = own.at(own.sizes)
        tensors = [one for one in self._passed(values) if not isinstance(one, int | float)]
        traffic = sum((one if isinstance(one, Tensor) else one.base).nbytes for one in tensors)
        if not own.tile:
            blocks = prod(values.grid)
            on_one = partial(self._blocks, built)
            return Workload(own.name, built, None, (0, 0, 0), blocks, traffic, on_one)
        rows, cols, depth = (own.sizes[name] for name in own.blocks)
        block_rows, block_cols, block_depth = own.blocks.values()
        first = next(iter(own.tensors.values()))
        product = Product(block_rows, block_cols, block_depth, getattr(torch, DTYPES[first.dtype]).itemsize)
        tiles = -(-rows // block_rows) * -(-cols // block_cols)
        on_one = partial(self._tiles, built)
        return Workload(own.name, built, product, (rows, cols, depth), tiles, traffic, on_one)

    def _blocks(self, built: Built, blocks: int, steps: int) -> Launch:
        values = self.own.at(self.own.sizes)
        return launch_of(built, self._passed(values), values.grid, blocks)

    def _tiles(self, built: Built, tiles: int, steps: int) -> Launch:
        values = self.own.at(self.own.of_tiles(tiles, steps), processors=1)
        return launch_of(built, self._passed(values), values.grid)

    def _passed(self, values: Values) -> Sequence[Any]:
        return [self._argument(name, values) for name in self.arguments]

    def _argument(self, name: str, values: Values) -> Any:
        kind = self.own.tensors.get(name)
        if kind is None:
            return values.numbers[name]
        shape, strides = values.shapes[name], values.strides[name]
        dtype = getattr(torch, DTYPES[kind.dtype])
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if not kind.block:
            return tensor
        return TensorDescriptor(tensor, list(shape), list(strides), list(kind.block))
