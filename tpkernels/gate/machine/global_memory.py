"""The tensors of the host, as a launch reads and writes them: within their storage, and once each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.values import triton_dtype


def storage_of(tensor: Tensor) -> Tensor:
    """All elements that lie where the tensor does."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


class Written:
    """Which places one launch has written: a second write would be a race, or work done twice."""

    def __init__(self) -> None:
        self._masks: dict[int, Tensor] = {}

    def write(self, tensor: Tensor, places: Tensor, values: Tensor, where: str) -> None:
        storage = storage_of(tensor)
        mask = self._masks.setdefault(
            tensor.untyped_storage().data_ptr(), torch.zeros(len(storage), dtype=torch.bool)
        )
        require_inside(storage, places, where)
        if bool(mask[places].any()):
            raise Misuse(f"{where}: writes global memory that this launch has written before")
        mask[places] = True
        storage[places] = values


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
        self.dtype = triton_dtype(self.tensor.dtype)

    @property
    def block_type(self) -> Descriptor:
        return self

    @property
    def element_ty(self) -> Any:
        return self.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.block_shape).numel()) * self.tensor.element_size()

    nbytes_per_cta = nbytes

    def _places(self, corner: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of each element of the box: whether it lies in the matrix, and where in the storage."""
        inside = torch.ones(self.block_shape, dtype=torch.bool)
        places = torch.full(self.block_shape, int(self.tensor.storage_offset()))
        for dim, (start, count) in enumerate(zip(corner, self.block_shape, strict=True)):
            index = torch.arange(start, start + count)
            index = index.view([-1 if other == dim else 1 for other in range(len(corner))])
            inside &= (index >= 0) & (index < self.shape[dim])
            places += index * self.strides[dim]
        return inside, places

    def read(self, corner: tuple[int, ...]) -> Tensor:
        inside, places = self._places(corner)
        return torch.where(inside, storage_of(self.tensor)[torch.where(inside, places, 0)], 0)

    def write(self, corner: tuple[int, ...], box: Tensor, written: Written, where: str) -> None:
        inside, places = self._places(corner)
        written.write(self.tensor, places[inside], box[inside], where)
