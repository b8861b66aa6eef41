"""What a kernel computes with, on the CPU: blocks whose values are computed later, and pointers.

A kernel is run once to record what it does. A block then knows its shape and dtype, by way of a meta tensor;
its value is computed when the recorded events are carried out, in whatever order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

_DTYPES: tuple[tuple[Any, torch.dtype], ...] = (
    (tl.float32, torch.float32),
    (tl.bfloat16, torch.bfloat16),
    (tl.float16, torch.float16),
    (tl.float64, torch.float64),
    (tl.float8e4nv, torch.float8_e4m3fn),
    (tl.float8e5, torch.float8_e5m2),
    (tl.int1, torch.bool),
    (tl.int8, torch.int8),
    (tl.int32, torch.int32),
    (tl.int64, torch.int64),
)


def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype of torch for one of Triton."""
    return next(ours for theirs, ours in _DTYPES if theirs == dtype)


def triton_dtype(dtype: torch.dtype) -> Any:
    """The dtype of Triton for one of torch."""
    return next(theirs for theirs, ours in _DTYPES if ours == dtype)


class TensorBlock:
    """A tensor of a kernel: shape and dtype are known, the value is computed when it is asked for."""

    def __init__(
        self,
        meta: Tensor,
        compute: Callable[[], Tensor] | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.meta = meta
        self.require_ready = ready  # raises while a product that writes these registers is in flight
        self._compute = compute
        self._value: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def dtype(self) -> Any:
        return triton_dtype(self.meta.dtype)

    @property
    def type(self) -> TensorBlock:
        return self

    @property
    def T(self) -> TensorBlock:
        return apply(torch.t, self)

    def value(self) -> Tensor:
        if self._value is None:
            assert self._compute is not None, "a block is used before what it comes from was carried out"
            self._value, self._compute = self._compute(), None
        return self._value

    def put(self, value: Tensor) -> None:
        assert value.shape == self.meta.shape, (value.shape, self.meta.shape)
        self._value = value

    def to(self, dtype: Any, fp_downcast_rounding: None = None, bitcast: bool = False) -> TensorBlock:
        if bitcast:
            return apply(lambda x: x.view(torch_dtype(dtype)), self)
        return apply(lambda x: x.to(torch_dtype(dtype)), self)

    def reshape(self, *shape: Any) -> TensorBlock:
        first, *others = _flat(shape)
        rows = self.meta.numel() // math.prod(others)
        if first not in (rows, 2 * rows):  # of a pair, each block has half
            raise ValueError(f"cannot reshape {tuple(self.shape)} into {(first, *others)}")
        return apply(lambda x: x.reshape(rows, *others), self)

    def permute(self, *order: Any) -> TensorBlock:
        return apply(lambda x: x.permute(_flat(order)), self)

    def split(self) -> tuple[TensorBlock, TensorBlock]:
        return apply(lambda x: x[..., 0], self), apply(lambda x: x[..., 1], self)

    def sum(self, axis: int) -> TensorBlock:
        return apply(lambda x: x.sum(axis), self)

    def __neg__(self) -> TensorBlock:
        return apply(operator.neg, self)

    def __invert__(self) -> TensorBlock:
        return apply(operator.invert, self)

    def __getitem__(self, index: Any) -> TensorBlock:
        return apply(lambda x: x[index], self)

    def __bool__(self) -> bool:
        raise TypeError("the flow of a kernel in the machine must not depend on what a tensor holds")


def _flat(sizes: Sequence[Any]) -> list[int]:
    nested = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
    return [int(size) for size in nested]


def apply(function: Callable[..., Tensor], *arguments: Any) -> TensorBlock:
    """function(*arguments), computed later; arguments are blocks, and what else torch takes."""
    blocks = [argument for argument in arguments if isinstance(argument, TensorBlock)]
    for block in blocks:
        block.require_ready()
    meta = function(*(a.meta if isinstance(a, TensorBlock) else a for a in arguments))
    return TensorBlock(
        meta, lambda: function(*(a.value() if isinstance(a, TensorBlock) else a for a in arguments))
    )


def constant(make: Callable[[str], Tensor]) -> TensorBlock:
    """The block that `make` makes on a device."""
    return TensorBlock(make("meta"), lambda: make("cpu"))


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[TensorBlock, Any], Any]:
    def method(self: TensorBlock, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return apply(function, other, self) if swapped else apply(function, self, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(TensorBlock, f"__{_name}__", _binary(getattr(operator, _name), False))
    setattr(TensorBlock, f"__r{_name}__", _binary(getattr(operator, _name), True))
for _name in ("and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(TensorBlock, f"__{_name.strip('_')}__", _binary(getattr(operator, _name), False))


class Scalar(int):
    """An integer of a kernel: of the grid, of the launch's sizes, or computed from them."""

    def to(self, dtype: Any) -> Scalar:
        return self


def _of_scalars(function: Callable[[int, int], Any]) -> Callable[[Scalar, Any], Any]:
    def method(self: Scalar, other: Any) -> Any:
        return Scalar(function(int(self), int(other))) if isinstance(other, int) else NotImplemented

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"):
    _method = _of_scalars(getattr(operator, _name))
    setattr(Scalar, f"__{_name.strip('_')}__", _method)
    if _name in ("add", "mul", "and_", "or_", "xor"):  # of which the order does not matter
        setattr(Scalar, f"__r{_name.strip('_')}__", _method)
Scalar.__rsub__ = lambda self, other: Scalar(int(other) - int(self))  # type: ignore[method-assign]


class Pointer:
    """An address in a tensor of the host, or a block of addresses."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor = tensor
        self.offset = offset  # in elements: an int, or a block of ints

    @property
    def dtype(self) -> Any:
        return tl.pointer_type(triton_dtype(self.tensor.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    __radd__ = __add__

    def places(self) -> TensorBlock:
        """Where in the storage of the tensor it points to."""
        start = self.tensor.storage_offset()
        if isinstance(self.offset, TensorBlock):
            return apply(lambda offset: offset.to(torch.int64) + start, self.offset)
        return constant(lambda device: torch.tensor(self.offset + start, device=device))
