"""What a kernel reads and writes: shared memory, and the tensors of the host.

A view of shared memory lists the elements it means, so that slices, permutations and reshapes need no rules
of their own. When a kernel is recorded, the elements that no view tells apart become one cell: what the
search works on. A tensor of the host is read and written within its storage, each place once in a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.values import torch_dtype, triton_dtype


def shape_in_block(shape: Sequence[int], layout: Any) -> list[int]:
    """What each block of a pair has of a shape that is the pair's; without a pair all of it."""
    return [size // (1 + split) for size, split in zip(shape, halves(shape, layout), strict=True)]


def halves(shape: Sequence[int], layout: Any) -> list[int]:
    """Of each dimension: 1 if the blocks of a pair have a half each, 0 if both have all of it."""
    bases = getattr(layout, "cga_layout", None) or []
    if len(bases) > 1 or any(at not in (0, 1) for basis in bases for at in basis):
        raise Misuse(f"the machine knows one block or a pair, and no layout over {bases}")
    last = list(bases[0]) if bases else []
    return [0] * (len(shape) - len(last)) + last  # buffers before them are each block's own


class Allocation:
    """What `allocate_shared_memory` returned, in one block.

    others: the same in the blocks of the pair, its own among them; one for both lies in the first
    """

    def __init__(self, name: str, dtype: Any, shape: Sequence[int], others: list[Allocation]) -> None:
        self.name, self.dtype, self.others = name, dtype, others
        others.append(self)
        self.views: list[View] = []
        self.data = torch.full((math.prod(shape),), math.nan if dtype.is_floating() else 0)
        self.data = self.data.to(torch_dtype(dtype))
        self.whole = View(self, torch.arange(len(self.data)).view(*shape), name)


class View:
    """A part of an allocation, as the methods of a shared memory descriptor cut it."""

    def __init__(self, allocation: Allocation, elements: Tensor, name: str) -> None:
        self.allocation, self.elements, self.name = allocation, elements, name
        self.cells: tuple[int, ...] = ()  # known once the kernel is recorded
        self._cut: dict[tuple[Any, ...], View] = {}
        allocation.views.append(self)

    @property
    def dtype(self) -> Any:
        return self.allocation.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.elements.shape)

    @property
    def type(self) -> View:
        return self

    @property
    def nbytes(self) -> int:
        return self.elements.numel() * self.allocation.data.element_size()

    def in_block(self, block: int) -> View:
        """The same view of what lies in that block of the pair."""
        others = self.allocation.others
        allocation = others[min(block, len(others) - 1)]
        if allocation is self.allocation:
            return self
        return View(allocation, self.elements, allocation.name + self.name.removeprefix(self.allocation.name))

    def index(self, index: int) -> View:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"{self.name} has {len(self.elements)} buffers, and number {index} is taken")
        return self._view(self.elements[index], f"{self.name}[{index}]", "index", index)

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        name = f"{self.name}[{':, ' * dim}{start}:{start + length}]"
        return self._view(self.elements.narrow(dim, start, length), name, "slice", start, length, dim)

    def permute(self, order: Sequence[int]) -> View:
        return self._view(self.elements.permute(*order), self.name, "permute", *order)

    def reshape(self, shape: Sequence[int]) -> View:
        return self._view(self.elements.reshape(*shape), self.name, "reshape", *shape)

    def _view(self, elements: Tensor, name: str, *how: Any) -> View:
        if how not in self._cut:
            self._cut[how] = View(self.allocation, elements, name)
        return self._cut[how]

    def get(self) -> Tensor:
        return self.allocation.data[self.elements]

    def put(self, value: Tensor | float) -> None:
        self.allocation.data[self.elements] = value


def assign_cells(allocations: Sequence[Allocation]) -> list[str]:
    """Number the cells of all views, and name each after the smallest view that holds it."""
    names: list[str] = []
    for allocation in allocations:
        largest_first = sorted(allocation.views, key=lambda view: -view.elements.numel())
        cell_of = torch.zeros(len(allocation.data), dtype=torch.int64)
        for view in {bytes(view.elements.unique().numpy()): view for view in largest_first}.values():
            cell_of *= 2
            cell_of[view.elements] += 1
            if int(cell_of.max()) > 2**60:
                cell_of = cell_of.unique(return_inverse=True)[1]
        cells, cell_of = cell_of.unique(return_inverse=True)
        named = dict.fromkeys(range(len(cells)), allocation.name)
        for view in largest_first:
            held = cell_of[view.elements].unique().tolist()
            view.cells = tuple(cell + len(names) for cell in held)
            named.update(dict.fromkeys(held, view.name))
        names += named.values()
    return names


def storage_of(tensor: Tensor) -> Tensor:
    """All elements that lie where the tensor does."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


class Written:
    """Which places one launch has written: a second write would be a race, or work done twice."""

    def __init__(self) -> None:
        self._masks: dict[int, Tensor] = {}

    def write(
        self, tensor: Tensor, places: Tensor, values: Tensor, where: str, accumulate: bool = False
    ) -> None:
        storage = storage_of(tensor)
        mask = self._masks.setdefault(
            tensor.untyped_storage().data_ptr(), torch.zeros(len(storage), dtype=torch.bool)
        )
        require_inside(storage, places, where)
        if bool(mask[places].any()):
            raise Misuse(f"{where}: writes global memory that this launch has written before")
        mask[places] = True
        storage[places] = storage[places] + values if accumulate else values


def require_inside(storage: Tensor, places: Tensor, where: str) -> None:
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < len(storage):
        raise Misuse(f"{where}: an address outside its tensor's storage")


class Descriptor:
    """A host tensor descriptor: boxes of a matrix, zero where they reach beyond it."""

    def __init__(self, host: Any) -> None:
        self.tensor: Tensor = host.base
        self.shape = tuple(int(size) for size in host.shape)
        self.strides = tuple(int(stride) for stride in host.strides)
        self.block_shape = [int(size) for size in host.block_shape]
        self.layout = host.layout
        self.box = shape_in_block(self.block_shape, self.layout)  # what a block moves
        self.dtype = triton_dtype(self.tensor.dtype)

    @property
    def block_type(self) -> Descriptor:
        return self

    @property
    def element_ty(self) -> Any:
        return self.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.box).numel()) * self.tensor.element_size()

    nbytes_per_cta = nbytes

    def corner(self, coord: Sequence[int], block: int) -> tuple[int, ...]:
        """Where the box of a block begins."""
        split = halves(self.block_shape, self.layout)
        return tuple(
            int(at) + block * half * size for at, half, size in zip(coord, split, self.box, strict=True)
        )

    def _places(self, corner: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of each element of the box: whether it lies in the matrix, and where in the storage."""
        inside = torch.ones(self.box, dtype=torch.bool)
        places = torch.full(self.box, int(self.tensor.storage_offset()))
        for dim, (start, count) in enumerate(zip(corner, self.box, strict=True)):
            index = torch.arange(start, start + count)
            index = index.view([-1 if other == dim else 1 for other in range(len(corner))])
            inside &= (index >= 0) & (index < self.shape[dim])
            places += index * self.strides[dim]
        return inside, places

    def read(self, corner: tuple[int, ...]) -> Tensor:
        inside, places = self._places(corner)
        return torch.where(inside, storage_of(self.tensor)[torch.where(inside, places, 0)], 0)

    def write(
        self, corner: tuple[int, ...], box: Tensor, written: Written, where: str, accumulate: bool = False
    ) -> None:
        inside, places = self._places(corner)
        written.write(self.tensor, places[inside], box[inside], where, accumulate)
