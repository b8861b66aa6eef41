"""What stands in for the functions of `gl` and `tl` that kernels call: the same on blocks of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.gate.machine.events import Global
from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.memory import (
    View,
    Written,
    halves,
    require_inside,
    shape_in_block,
    storage_of,
)
from tpkernels.gate.machine.recorder import current
from tpkernels.gate.machine.values import Pointer, Scalar, TensorBlock, apply, constant, torch_dtype


def program_id(axis: int) -> Scalar:
    return Scalar(current().program[axis])


def num_programs(axis: int) -> Scalar:
    return Scalar(current().grid[axis])


def num_warps() -> int:
    return current().num_warps


def num_ctas() -> int:
    return current().blocks


def warp_specialize(
    functions_and_args: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int] | None = None,
) -> Any:
    workers = len(functions_and_args) - 1
    if len(worker_num_warps) != workers or (worker_num_regs and len(worker_num_regs) != workers):
        raise Misuse(
            f"warp_specialize: {workers} workers, {worker_num_warps} warps, {worker_num_regs} registers"
        )
    if not all(24 <= registers <= 256 and registers % 8 == 0 for registers in worker_num_regs or ()):
        raise Misuse(
            f"warp_specialize: setmaxnreg takes multiples of 8 from 24 to 256, not {worker_num_regs}"
        )
    return current().specialize(functions_and_args)


def allocate_shared_memory(element_ty: Any, shape: Sequence[int], layout: Any = None) -> View:
    return current().allocate(element_ty, shape, layout)


def barrier(*, cluster: bool = False) -> None:
    """Wait for the other block of a pair; one thread does all of a role, and has nobody else to wait for."""
    if cluster:
        current().await_blocks()


def arange(start: int, end: int, layout: Any = None) -> TensorBlock:
    (count,), (half,) = shape_in_block([end - start], layout), halves([end - start], layout)
    start += count * half * current().block
    end = start + count
    return constant(lambda device: torch.arange(start, end, dtype=torch.int32, device=device))


def full(shape: Sequence[int], value: float, dtype: Any, layout: Any = None) -> TensorBlock:
    sizes = shape_in_block(shape, layout)
    return constant(lambda device: torch.full(tuple(sizes), value, dtype=torch_dtype(dtype), device=device))


def zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> TensorBlock:
    return full(shape, 0, dtype, layout)


def zeros_like(block: TensorBlock) -> TensorBlock:
    return apply(torch.zeros_like, block)


def full_like(block: TensorBlock, value: float) -> TensorBlock:
    return apply(lambda x: torch.full_like(x, value), block)


def load(pointer: Pointer, mask: TensorBlock | None = None, other: float = 0.0, **hints: Any) -> TensorBlock:
    storage, places = storage_of(pointer.tensor), pointer.places()
    if mask is not None:
        places = apply(lambda place, where: torch.broadcast_tensors(place, where)[0], places, mask)
    loaded = TensorBlock(torch.empty(places.shape, dtype=storage.dtype, device="meta"))

    def effect(written: Written) -> None:
        inside = torch.ones((), dtype=torch.bool) if mask is None else mask.value()
        index = torch.where(inside, places.value(), 0)
        require_inside(storage, index, event.where)
        loaded.put(torch.where(inside, storage[index], torch.tensor(other, dtype=storage.dtype)))

    event = current().emit(Global, effect)
    return loaded


def store(pointer: Pointer, value: TensorBlock, mask: TensorBlock | None = None, **hints: Any) -> None:
    dtype = pointer.tensor.dtype
    stored, places = apply(lambda x: x.to(dtype), value), pointer.places()

    def effect(written: Written) -> None:
        place, what = torch.broadcast_tensors(places.value(), stored.value())
        inside = torch.ones_like(place, dtype=torch.bool) if mask is None else mask.value().expand_as(place)
        written.write(pointer.tensor, place[inside], what[inside], event.where)

    event = current().emit(Global, effect)


def static_assert(condition: bool, message: str = "") -> None:
    if not condition:
        raise AssertionError(message)


def static_range(*bounds: int) -> range:
    return range(*bounds)


def loop_range(*bounds: int, **hints: Any) -> Iterator[Scalar]:
    return map(Scalar, range(*bounds))


def unchanged(value: Any, *hints: Any, **more: Any) -> Any:
    return value


def nothing(*arguments: Any, **options: Any) -> None:
    """Has no meaning where one thread does all of a role."""


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def _either(of_numbers: Callable[..., Any], of_tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function of numbers or blocks."""

    def function(*arguments: Any, **hints: Any) -> Any:
        if not any(isinstance(argument, TensorBlock) for argument in arguments):
            return of_numbers(*arguments)
        dtype = next(a.meta.dtype for a in arguments if isinstance(a, TensorBlock))
        as_tensors = [a if isinstance(a, TensorBlock) else constant(_scalar(a, dtype)) for a in arguments]
        return apply(of_tensors, *as_tensors)

    return function


def _scalar(number: float, dtype: torch.dtype) -> Callable[[str], Tensor]:
    return lambda device: torch.tensor(number, dtype=dtype, device=device)


def where(condition: TensorBlock, x: Any, y: Any) -> TensorBlock:
    return apply(torch.where, condition, x, y)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[TensorBlock], TensorBlock]:
    return lambda block: apply(function, block)


def total(block: TensorBlock, axis: int | None = None) -> TensorBlock:
    return apply(lambda x: x.sum() if axis is None else x.sum(axis), block)


def largest(block: TensorBlock, axis: int) -> TensorBlock:
    return apply(lambda x: x.amax(axis), block)


def smallest(block: TensorBlock, axis: int) -> TensorBlock:
    return apply(lambda x: x.amin(axis), block)


def reshape(block: TensorBlock, *shape: Any) -> TensorBlock:
    return block.reshape(*shape)


def permute(block: TensorBlock, *order: Any) -> TensorBlock:
    return block.permute(*order)


def trans(block: TensorBlock) -> TensorBlock:
    return block.T


def split(block: TensorBlock) -> tuple[TensorBlock, TensorBlock]:
    return block.split()


def join(left: TensorBlock, right: TensorBlock) -> TensorBlock:
    return apply(lambda x, y: torch.stack([x, y], -1), left, right)


def expand_dims(block: TensorBlock, axis: int) -> TensorBlock:
    return apply(lambda x: x.unsqueeze(axis), block)


def cast(block: TensorBlock, dtype: Any) -> TensorBlock:
    return block.to(dtype)


_ASSEMBLY: dict[str, Callable[..., Tensor]] = {"tanh.approx.f32 $0, $1;": torch.tanh}


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> TensorBlock:
    if asm not in _ASSEMBLY:
        raise NotImplementedError(f"the machine does not know the assembly {asm!r}")
    return apply(_ASSEMBLY[asm], *args)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (
            *(program_id, num_programs, num_warps, num_ctas, warp_specialize, allocate_shared_memory),
            *(barrier, arange, full),
            *(zeros, zeros_like, full_like, load, store, static_assert, static_range, cdiv, where, reshape),
            *(permute, trans, split, join, expand_dims, cast, inline_asm_elementwise),
        )
    },
    "range": loop_range,
    "sum": total,
    "max": largest,
    "min": smallest,
    "minimum": _either(min, torch.minimum),
    "maximum": _either(max, torch.maximum),
    "exp": _unary(torch.exp),
    "exp2": _unary(torch.exp2),
    "log": _unary(torch.log),
    "log2": _unary(torch.log2),
    "sqrt": _unary(torch.sqrt),
    "rsqrt": _unary(torch.rsqrt),
    "erf": _unary(torch.erf),
    "sigmoid": _unary(torch.sigmoid),
    "abs": _unary(torch.abs),
    "fma": _either(lambda x, y, z: x * y + z, lambda x, y, z: x * y + z),
    **dict.fromkeys(("convert_layout", "set_auto_layout", "multiple_of", "max_contiguous"), unchanged),
    **dict.fromkeys(("to_tensor", "constexpr"), unchanged),
    **dict.fromkeys(("assume", "device_assert", "device_print", "static_print"), nothing),
}
