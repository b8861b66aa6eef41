"""What one SM is given to do: blocks of a compiled kernel with their arguments.

It stands for an SM's part of a launch on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.clock.cubin import Cubin, read
from tpkernels.gate.clock.values import (
    ADDRESSES,
    Argument,
    BlockValues,
    Constants,
    Contents,
    Integers,
    Value,
    WarpState,
    initial_values,
)
from tpkernels.gate.occupancy import WARP, blocks_by_limit

SCRATCH = 2  # pointers that Triton adds: memory for all blocks, and for its profiler
SWIZZLE = 128  # bytes of a row that the copy engine moves at a time at most
BOX_ROWS = 256


class WrongLaunch(ValueError):
    """The launch is not one of this compiled kernel."""


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel, as far as launching it asks."""

    code: Cubin
    warps: int  # of a block
    shared: int  # bytes of a block

    @staticmethod
    def of(compiled: Any) -> Built:
        """compiled: what `triton.compile` returns"""
        return Built(read(compiled.asm["cubin"]), compiled.metadata.num_warps, compiled.metadata.shared)

    def fitting(self) -> int:
        """Blocks that an SM holds."""
        limits = blocks_by_limit("sm_90", self.code.registers, WARP * self.warps, self.shared)
        if min(limits.values()) < 1:
            limit = min(limits, key=limits.__getitem__)
            raise WrongLaunch(f"{self.code.kernel}: no block fits on an SM, by its {limit}")
        return min(limits.values())


@dataclass(frozen=True, slots=True)
class SmLaunch:
    """Blocks for one SM, which takes `resident` of them at a time, the next one as one of them ends."""

    built: Built
    constants: Constants
    boxes: Mapping[int, int]  # offset of a descriptor in constant bank 0 -> bytes of a copy
    grid: tuple[int, int, int]  # as the kernel is told
    blocks: int  # that the SM runs: the first ones of the grid
    resident: int
    initial: Mapping[str, Value] = field(repr=False)
    contents: Contents | None = None

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.built.warps

    @property
    def programs(self) -> Sequence[tuple[int, int, int]]:
        """Ids of the blocks that the SM runs, in their order."""
        x, y, z = (range(side) for side in self.grid)
        return [(i, j, k) for k, j, i in islice(product(z, y, x), self.blocks)]

    def states(self, program: tuple[int, int, int]) -> Sequence[WarpState]:
        """The warps of a block that starts."""
        block = BlockValues(program, self.constants, self.initial, self.contents)
        return [WarpState(number, block) for number in range(self.warps)]


def launch_of(
    built: Built,
    values: Sequence[Any],
    grid: Sequence[int],
    blocks: int | None = None,
    contents: Mapping[int, int] | None = None,
) -> SmLaunch:
    """A launch of any kernel.

    values: of the arguments that are not compiled in, in order: tensors (on the meta device, say), tensor
        descriptors, numbers; None for what is not known
    blocks: that the SM runs; None: the whole grid
    contents: number of a value that is a tensor of integers -> by how much each is more than the one before,
        from 0 on; with it, a loop whose turns hang on other data is an error; None: such a loop turns once
    """
    arguments: list[Argument] = []
    boxes: dict[int, int] = {}
    parameters = built.code.parameters
    for number, value in enumerate(values):
        if hasattr(value, "block_shape"):  # a descriptor: what the copy engine reads, then sizes and strides
            if len(arguments) < len(parameters):
                boxes[parameters[len(arguments)].offset] = box_bytes(value)
            arguments += [None, *value.shape, *value.strides]
        elif isinstance(value, Tensor):
            arguments.append((number + 1) * ADDRESSES + int(value.data_ptr()) % 16)
        else:
            arguments.append(value)
    arguments += [0] * SCRATCH
    if len(arguments) != len(parameters):
        raise WrongLaunch(
            f"{built.code.kernel}: expected {len(parameters)} parameters, as compiled, got {len(arguments)}"
        )
    x, y, z = (*grid, 1, 1)[:3]
    constants = Constants.of(built.code, arguments, (x, y, z), WARP * built.warps)
    count = x * y * z if blocks is None else min(blocks, x * y * z)
    initial = initial_values(built.code, constants)
    held = None
    if contents is not None:
        held = {at: Integers(step, values[at].itemsize) for at, step in contents.items()}
    return SmLaunch(built, constants, boxes, (x, y, z), count, min(built.fitting(), count), initial, held)


def box_bytes(descriptor: Any) -> int:
    """What the copy engine moves at a time: the block, in boxes no wider than a swizzled row."""
    *outer, inner = descriptor.block_shape
    dtype: torch.dtype = descriptor.base.dtype
    return int(prod(min(side, BOX_ROWS) for side in outer) * min(inner * dtype.itemsize, SWIZZLE))
