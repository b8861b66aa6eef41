"""What one SM is given to do: blocks of a compiled kernel with their arguments.

It stands for an SM's part of a launch on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpkernels.gate.clock.cubin import Cubin, read
from tpkernels.gate.occupancy import blocks_by_limit

if TYPE_CHECKING:
    from tpkernels.gate.clock.values import Argument

ADDRESSES = 2**40  # from one tensor's address to the next one's
SCRATCH = 2  # pointers that Triton adds: memory for all blocks, and for its profiler


class WrongLaunch(ValueError):
    """The launch is not one of this compiled kernel."""


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel, as far as launching it asks."""

    code: Cubin
    warps: int  # of a block, all roles
    shared: int  # bytes of a block
    boxes: tuple[int, ...] = ()  # bytes that the copy engine moves at a time, of each descriptor

    @staticmethod
    def of(compiled: Any) -> Built:
        """compiled: what `triton.compile` returns"""
        meta = compiled.metadata
        boxes = [box_bytes(one) for one in getattr(meta, "tensordesc_meta", None) or ()]
        return Built(read(compiled.asm["cubin"]), meta.num_warps, meta.shared, tuple(boxes))

    def fitting(self) -> int:
        """Blocks that an SM holds."""
        limits = blocks_by_limit("sm_90", self.code.registers, 32 * self.warps, self.shared)
        if min(limits.values()) < 1:
            limit = min(limits, key=limits.__getitem__)
            raise WrongLaunch(f"{self.code.kernel}: no block fits on an SM, by its {limit}")
        return min(limits.values())


@dataclass(frozen=True, slots=True)
class Launch:
    """Blocks for one SM, which takes `resident` of them at a time, the next one as one of them ends."""

    built: Built
    arguments: tuple[Argument, ...]  # one for each parameter of the machine code
    boxes: Mapping[int, int]  # offset of a descriptor in constant bank 0 -> bytes of a copy
    grid: tuple[int, int, int]  # as the kernel is told
    blocks: int  # that the SM runs: the first ones of the grid
    resident: int


def launch_of(built: Built, values: Sequence[Any], grid: tuple[int, ...], blocks: int | None = None) -> Launch:
    """A launch of any kernel.

    values: of the arguments that are not compiled in, in order: tensors (on the meta device, say), tensor
        descriptors, numbers; None for what is not known
    blocks: that the SM runs; None: the whole grid
    """
    arguments: list[Argument] = []
    boxes: dict[int, int] = {}
    sizes = iter(built.boxes)
    parameters = built.code.parameters
    for number, value in enumerate(values):
        if hasattr(value, "block_shape"):  # a descriptor: what the copy engine reads, then sizes and strides
            if len(arguments) < len(parameters):
                boxes[parameters[len(arguments)].offset] = next(sizes, 0)
            arguments += [None, *value.shape, *value.strides]
        elif isinstance(value, Tensor):
            arguments.append((number + 1) * ADDRESSES + _offset(value))
        else:
            arguments.append(value)
    arguments += [0] * SCRATCH
    if len(arguments) != len(parameters) or 0 in boxes.values():
        raise WrongLaunch(
            f"{built.code.kernel}: expected arguments for {len(parameters)} parameters and "
            f"{len(built.boxes)} descriptors, got {len(arguments)} and {len(boxes)}: compile and launch it alike"
        )
    sides = (*grid, 1, 1)
    count = sides[0] * sides[1] * sides[2] if blocks is None else blocks
    return Launch(built, tuple(arguments), boxes, sides[:3], count, min(built.fitting(), count))


def _offset(tensor: Tensor) -> int:
    """Bytes from a multiple of 16."""
    return int(tensor.data_ptr()) % 16


def box_bytes(meta: Mapping[str, Any]) -> int:
    """What the copy engine moves at a time, by what Triton says of a descriptor."""
    return int(prod(meta["block_size"])) * int(meta["elem_size"])
