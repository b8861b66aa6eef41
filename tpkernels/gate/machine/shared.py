"""Shared memory: allocations, views of them, and the cells that views consist of.

A view lists the elements it means, so that slices, permutations and reshapes need no rules of their own. When
a kernel is recorded, the elements that no view tells apart become one cell: what the search works on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.machine.values import torch_dtype


class Allocation:
    """What `allocate_shared_memory` returned."""

    def __init__(self, name: str, dtype: Any, shape: Sequence[int]) -> None:
        self.name, self.dtype = name, dtype
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
