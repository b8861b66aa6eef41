"""What makes Triton's interpreter honest: products and casts of bf16 and fp8, and the TMA reduce-add.

With TRITON_INTERPRET=1 Triton runs kernels in NumPy, which has neither: such tensors are held as raw bits.
Upstream (3.6 to 3.9) `tl.dot`, sums and comparisons take those of bf16 for integers, and a cast from fp32
cuts the lower bits off where hardware rounds to nearest even; a cast to fp32 makes subnormal numbers zero.
Scalars of bf16 cannot be made. A cast to fp8 loses what rounding carries into the exponent, so that 1.984
becomes 1; casts and products of fp8 take NaN for a number, and some numbers for zero. Products of fp32 go to
the machine's BLAS, whose order of adding depends on shapes on some processors; in float64, rounded once, no
order shows.
`tensor_descriptor.atomic_add` is missing altogether. 3.9 refuses a mask that is an
`&` of comparisons of scalars and blocks, which it holds as integers. `mend()` replaces all of these. It is
called where kernels are defined, and does nothing in a process that compiles.

At each call of a function upstream looks through all of `triton.language` for what it replaces meanwhile, and
replaces all of it again inside a call. For each value it makes a table of NumPy's dtypes, spells the name of
the block's type, and makes new objects of the shape. It computes whether a sum of integers overflows, and
says so in debug mode only. All that took more than half of the time of interpreted kernels; `mend()` lets it
look and replace once, keep dtypes, types and shapes, and look for overflows where it says what it finds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

INTERPRETING: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels defined in this process are interpreted. Read when they are defined, as Triton does."""


def bf16_from_fp32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of bf16, rounded to nearest even. Every NaN becomes the one quiet NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    tie_to_even = (bits >> 16) & 1
    rounded = ((bits + (tie_to_even + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)  # else a NaN may round up to infinity


def fp32_from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The value of each bf16, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def fp8_from_fp32(values: npt.NDArray[np.float32], dtype: torch.dtype) -> npt.NDArray[np.uint8]:
    """The bits of fp8, rounded to nearest even.

    What is too large, infinity among it, becomes the largest number of its sign, and every NaN the one
    without sign, as Nvidia's `cvt.rn.satfinite` does. Torch's own cast gives NaN (e4m3) or infinity (e5m2).
    """
    largest = torch.finfo(dtype).max
    held = torch.from_numpy(np.array(values, dtype=np.float32)).clamp(-largest, largest)
    return torch.where(held.isnan(), 0x7F, held.to(dtype).view(torch.uint8)).numpy()


def fp32_from_fp8(bits: npt.NDArray[np.uint8], dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """The value of each fp8, exactly."""
    return torch.from_numpy(np.array(bits, dtype=np.uint8)).view(dtype).float().numpy()


# Functions that get each load and store of a kernel: "read" or "written", addresses, and which are accessed.
accesses: list[Callable[[str, npt.NDArray[np.uint64], npt.NDArray[np.bool_]], object]] = []


class Widened:
    """Whether casts to bf16 keep all bits of fp32: what a kernel rounds to any other type shows then."""

    bf16 = False


def _tell(how: str, pointers: Any, mask: Any) -> None:
    inside = mask.data if isinstance(mask, interpreter.TensorHandle) else mask  # the former since Triton 3.9
    for watch in accesses:
        watch(how, pointers.data, inside)


def mend() -> None:
    """Replace what is wrong or missing in the interpreter, once; nothing when kernels are compiled."""
    builder = interpreter.InterpreterBuilder
    if not INTERPRETING or getattr(builder, "_mended_by_tpkernels", False):
        return
    upstream_dot, upstream_cast, upstream_fp8 = (
        builder.create_dot,
        builder.cast_impl,
        builder.create_fp_to_fp,
    )
    upstream_load, upstream_store = builder.create_masked_load, builder.create_masked_store
    upstream_binary, upstream_unary = builder.binary_op, builder.unary_op

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_imprecise: Any) -> Any:
        a, b = _as_fp32(a), _as_fp32(b)
        if d.dtype.scalar != tl.float32:
            return upstream_dot(self, a, b, d, input_precision, max_imprecise)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, tl.float32)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if Widened.bf16 and kinds[1] == tl.bfloat16 and source.data.dtype.kind == "f":
            return interpreter.TensorHandle(source.data.astype(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(bf16_from_fp32(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return _as_fp32(source)
        return upstream_cast(self, source, target)

    def get_bf16(self: Any, value: float) -> Any:
        return cast_impl(self, self.get_fp32(value), tl.bfloat16)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if tl.bfloat16 not in (left.dtype.scalar, right.dtype.scalar):
            return upstream_binary(self, left, right, operation)
        wide = operation(_as_fp32(left).data, _as_fp32(right).data)
        if wide.dtype == np.bool_:
            return interpreter.TensorHandle(wide, tl.bfloat16)
        return cast_impl(self, interpreter.TensorHandle(wide, tl.float32), tl.bfloat16)

    def unary_op(self: Any, argument: Any, operation: Any) -> Any:
        if argument.dtype.scalar != tl.bfloat16:
            return upstream_unary(self, argument, operation)
        wide = interpreter.TensorHandle(operation(_as_fp32(argument).data), tl.float32)
        return cast_impl(self, wide, tl.bfloat16)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (dtype := _FP8.get(target.scalar)) and rounding == ir.ROUNDING_MODE.RTNE:
            return interpreter.TensorHandle(fp8_from_fp32(_as_fp32(source).data, dtype), target.scalar)
        if source.dtype.scalar in _FP8:
            wide = _as_fp32(source)
            return wide if target.scalar == tl.float32 else cast_impl(self, wide, target)
        return upstream_fp8(self, source, target, rounding)

    # what follows a mask is called otherwise in each Triton
    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        mask = _of_bools(mask)
        _tell("read", pointers, mask)
        return upstream_load(self, pointers, mask, *others, **named)

    def create_masked_store(
        self: Any, pointers: Any, value: Any, mask: Any, *others: Any, **named: Any
    ) -> Any:
        mask = _of_bools(mask)
        _tell("written", pointers, mask)
        return upstream_store(self, pointers, value, mask, *others, **named)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    builder.create_dot = create_dot
    builder.create_fp_to_fp = create_fp_to_fp
    builder.cast_impl = cast_impl
    builder.get_bf16, builder.binary_op, builder.unary_op = get_bf16, binary_op, unary_op
    builder.create_descriptor_reduce = _create_descriptor_reduce
    builder._mended_by_tpkernels = True
    for home in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _BUILTINS[home] = _looked_up(home)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _np_dtype
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _find_overflow


_BUILTINS: dict[Any, tuple[str, ...]] = {}  # of before any kernel runs: then some are replaced


def _looked_up(home: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(home) if tl.core.is_builtin(member))


def _patch_builtin(home: Any, builder: Any, scope: Any) -> None:
    """As upstream's: a call inside of another finds them replaced."""
    for name in _BUILTINS.get(home) or _looked_up(home):
        member = getattr(home, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(home, name, member, builder, scope)


class _Replaced:
    """For the time of a call of a kernel."""

    languages: frozenset[Any] = frozenset()


_upstream_patch_lang = interpreter._patch_lang


def _patch_lang(function: Any) -> Any:
    """As upstream's, but for what a call around this one has replaced already."""
    languages = {value for value in function.__globals__.values() if value is tl or value is tl.core}
    if languages and languages <= _Replaced.languages:
        return interpreter._LangPatchScope()
    scope = _upstream_patch_lang(function)
    scope.set_attr(_Replaced, "languages", frozenset(languages))  # restored with the rest
    return scope


_SHAPED: dict[Any, dict[str, Any]] = {}
_upstream_block_type, _upstream_tensor = tl.block_type.__init__, tl.tensor.__init__


def _init_block_type(self: Any, element: Any, shape: Any) -> None:
    """With the name and the shape of another, of as many elements of this name."""
    key = element.name, *(getattr(size, "value", size) for size in shape)
    if key not in _SHAPED:
        _upstream_block_type(self, element, shape)
        _SHAPED[key] = {name: getattr(self, name) for name in ("name", "shape", "numel")}
    vars(self).update(_SHAPED[key])
    self.element_ty = element


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    """With the shape of another, of a type of this name."""
    if kind.name not in _SHAPED:
        _upstream_tensor(self, handle, kind)
        _SHAPED[kind.name] = {name: getattr(self, name) for name in ("shape", "numel")}
    vars(self).update(_SHAPED[kind.name])
    self.handle, self.type, self.dtype = handle, kind, kind.scalar


_upstream_find_overflow = interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl


def _find_overflow(left: Any, right: Any, operation: Any) -> None:
    if interpreter.interpreter_builder.options.debug:
        _upstream_find_overflow(left, right, operation)


_NP_DTYPES: dict[str, Any] = {}
_upstream_np_dtype = interpreter._get_np_dtype


def _np_dtype(kind: Any) -> Any:
    """In which NumPy holds a Triton type; a block's is that of its elements."""
    name = kind.scalar.name
    if name not in _NP_DTYPES:
        _NP_DTYPES[name] = _upstream_np_dtype(kind.scalar)
    return _NP_DTYPES[name]


def _as_fp32(handle: Any) -> Any:
    """Of what NumPy has no type for; all else as it is."""
    kind = handle.dtype.scalar
    if kind in _FP8:
        return interpreter.TensorHandle(fp32_from_fp8(handle.data, _FP8[kind]), tl.float32)
    if kind != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(fp32_from_bf16(handle.data), tl.float32)


def _of_bools(mask: Any) -> Any:
    if not isinstance(mask, interpreter.TensorHandle) or mask.data.dtype == np.bool_:
        return mask
    return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


def _create_descriptor_reduce(self: Any, kind: Any, descriptor: Any, value: Any, offsets: Any) -> None:
    """`descriptor[offsets] += value`: a read, a sum and a write are one step, as programs run one by one."""
    if "ADD" not in str(kind).upper() or value.dtype.scalar != tl.float32:
        raise NotImplementedError(
            f"the interpreter reduces by fp32 addition only, got {kind} of {value.dtype}"
        )
    pointers, mask = descriptor.materialize_pointers(offsets)
    inside = mask.data if isinstance(mask, interpreter.TensorHandle) else mask  # the former since Triton 3.9
    zeros = np.zeros(pointers.data.shape, dtype=np.float32)
    old = interpreter._interpreter.load(pointers.data, inside, zeros, np.dtype(np.float32))
    interpreter._interpreter.store(pointers.data, old + value.data, inside)
