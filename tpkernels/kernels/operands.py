"""What a launcher demands of its tensors, and which form of kernel their layout allows. No Triton, no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tpkernels.kernels.recipe import BLOCK
from tpkernels.kernels.target import Target

Form = Literal["descriptor", "pointer"]
Named = tuple[str, Tensor | None]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TMA_ALIGNMENT = 16  # bytes: of the base address, and of the distance between rows
MAX_TMA_STRIDE = 2**40  # bytes
MAX_TMA_SIZE = 2**31 - 1  # elements a dimension: coordinates are int32


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """How a matrix lies in memory; all that the choice of a form looks at."""

    name: str
    rows: int
    cols: int
    row_stride: int  # in elements, like torch's
    col_stride: int
    itemsize: int
    address: int

    @staticmethod
    def of(name: str, tensor: Tensor) -> MatrixLayout:
        (rows, cols), (row_stride, col_stride) = tensor.shape, tensor.stride()
        return MatrixLayout(
            name, rows, cols, row_stride, col_stride, tensor.element_size(), tensor.data_ptr()
        )

    def tma_obstacle(self) -> str | None:
        """Why no tensor descriptor can describe this matrix; None if one can."""
        if self.rows == 0 or self.cols == 0:
            return f"{self.name} is empty"
        if max(self.rows, self.cols) > MAX_TMA_SIZE:
            return f"{self.name} has more than {MAX_TMA_SIZE} rows or columns"
        if self.address % TMA_ALIGNMENT:
            off = self.address % TMA_ALIGNMENT
            return f"{self.name} starts {off} bytes past a {TMA_ALIGNMENT}-byte boundary"
        if self.col_stride != 1 and self.cols > 1:
            return f"{self.name} has a column stride of {self.col_stride}, not 1"
        pitch = self.row_pitch * self.itemsize
        if pitch % TMA_ALIGNMENT or not 0 < pitch < MAX_TMA_STRIDE:
            return (
                f"{self.name} has {pitch} bytes from row to row, not a positive multiple of {TMA_ALIGNMENT}"
            )
        return None

    @property
    def row_pitch(self) -> int:
        """The row stride a descriptor is given. A single row has none, whatever torch says of it."""
        per_unit = TMA_ALIGNMENT // self.itemsize
        return self.row_stride if self.rows > 1 else -(-self.cols // per_unit) * per_unit


def lies_depth_first(weight: Tensor) -> bool:
    """Whether a (cols, depth) weight lies in memory as (depth, cols), as `weight.t()` often does."""
    return weight.stride(0) == 1 != weight.stride(1)


def choose_form(target: Target, dtype: torch.dtype, layouts: tuple[MatrixLayout, ...]) -> Form:
    """The form that fits: descriptors where the hardware has TMA and every matrix can be described.

    `dtype` is that of the first multiplied operand. fp32 takes pointers: true fp32 has no tensor-core
    instruction to feed.
    """
    return "pointer" if _descriptor_obstacle(target, dtype, layouts) else "descriptor"


def require_form(
    launcher: str, form: Form, target: Target, dtype: torch.dtype, layouts: tuple[MatrixLayout, ...]
) -> None:
    """An explicit form never falls back silently."""
    if form not in get_args(Form):
        raise ValueError(f"{launcher}: expected form 'descriptor' or 'pointer', got {form!r}")
    obstacle = _descriptor_obstacle(target, dtype, layouts) if form == "descriptor" else None
    if obstacle:
        raise ValueError(
            f"{launcher}: form='descriptor' does not fit: {obstacle}; use form='pointer' or form=None"
        )


def _descriptor_obstacle(target: Target, dtype: torch.dtype, layouts: tuple[MatrixLayout, ...]) -> str | None:
    if not target.has_tma:
        return f"{target.backend} (capability {target.capability}) has no tensor memory accelerator"
    if dtype.itemsize > 2:
        return f"descriptor kernels multiply bfloat16, float16 and fp8, not {dtype}"
    return next((obstacle for layout in layouts if (obstacle := layout.tma_obstacle())), None)


def require_matrices(launcher: str, *named: Named) -> None:
    """Every tensor given is 2-D, of one supported dtype, on one device."""
    require_tensors(launcher, *named)
    for name, tensor in named:
        if tensor is not None and tensor.ndim != 2:
            raise ValueError(
                f"{launcher}: expected {name} of 2 dimensions, got shape {tuple(tensor.shape)}: "
                "flatten the leading dimensions into one"
            )


def require_tensors(launcher: str, *named: Named) -> None:
    """Every tensor given is a plain strided one, of one supported dtype, on one device."""
    (first_name, first), *_ = ((name, tensor) for name, tensor in named if tensor is not None)
    for name, tensor in named:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{launcher}: expected a Tensor as {name}, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{launcher}: expected a dense {name}, got layout {tensor.layout}: call .to_dense()"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{launcher}: expected {name} in bfloat16, float16 or float32, got {tensor.dtype}"
            )
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{launcher}: expected one dtype, got {first_name} in {first.dtype} and {name} in "
                f"{tensor.dtype}: cast one of them, or use autocast"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{launcher}: expected one device, got {first_name} on {first.device} and {name} on "
                f"{tensor.device}: move one of them"
            )


def require_scaled(launcher: str, *named: tuple[str, Tensor, Tensor]) -> None:
    """Two matrices in fp8 that are multiplied, each with its scales: names, data and scale as of `Scaled`.

    The second one's scales may be one for each 128 of its rows.
    """
    (_, first, first_scale), _ = named
    for name, data, scale in named:
        for what, tensor, dtypes in ((name, data, FP8), (f"{name}'s scale", scale, (torch.float32,))):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{launcher}: expected a Tensor as {what}, got {type(tensor).__name__}")
            if tensor.dtype not in dtypes or tensor.layout != torch.strided:
                words = " or ".join(map(str, dtypes))
                raise TypeError(
                    f"{launcher}: expected {what} dense and in {words}, got {tensor.layout} {tensor.dtype}"
                )
            if tensor.ndim != 2 or tensor.device != first.device:
                raise ValueError(
                    f"{launcher}: expected {what} of 2 dimensions on {first.device}, got shape "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
        rows, features = data.shape
        if data.stride(1) != 1 and features > 1:
            raise ValueError(
                f"{launcher}: expected the rows of {name} contiguous, as tensor cores read fp8, got strides "
                f"{data.stride()}: quantize the transposed matrix instead"
            )
        blocks = -(-features // BLOCK)
        shapes = {(rows, 1), (rows, blocks)} | ({(-(-rows // BLOCK), blocks)} if data is not first else set())
        if tuple(scale.shape) not in shapes or scale.shape[1] != first_scale.shape[1]:
            raise ValueError(
                f"{launcher}: expected {name}'s scale of shape ({rows}, S), where S is 1 or {blocks}, the "
                f"same for both matrices, got {tuple(scale.shape)}, where the first has "
                f"{tuple(first_scale.shape)}"
            )


def require_shape(launcher: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], why: str) -> None:
    """`why` names where the expected shape comes from: "(out_features,) of weight (8, 4)"."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{launcher}: expected {name} of shape {shape}, {why}; got {tuple(tensor.shape)}")


def require_writable(launcher: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """A matrix that a kernel may change in place: of a supported dtype, on `device`, no element twice."""
    require_matrices(launcher, (name, tensor))
    if tensor.device != device:
        raise ValueError(
            f"{launcher}: expected {name} on {device} like the other tensors, got {tensor.device}"
        )
    _require_not_negated(launcher, name, tensor)
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{launcher}: expected {name} with memory of its own for each element, got strides "
            f"{tensor.stride()} for shape {tuple(tensor.shape)}: clone the expanded tensor"
        )


def _require_not_negated(launcher: str, name: str, tensor: Tensor) -> None:
    if tensor.is_neg():
        raise ValueError(
            f"{launcher}: expected {name} whose memory holds its numbers, got one with torch's lazy "
            "negation: call .resolve_neg()"
        )


def require_results(
    launcher: str,
    wanted: Mapping[str, tuple[int, ...]],
    given: Sequence[Tensor],
    inputs: Sequence[Named],
    sums: bool = False,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> None:
    """What a kernel is to write into: of these shapes, contiguous, apart from each other and the inputs.

    Matrices have `dtype`, or that of the first input, or fp32 if they may be `sums`; vectors are sums in
    fp32. Rows of a larger contiguous matrix are contiguous. in_place: a result may be an input itself.
    """
    words = ", ".join(f"{name} {shape}" for name, shape in wanted.items())
    if len(given) != len(wanted):
        raise ValueError(f"{launcher}: expected {len(wanted)} tensors as out, {words}; got {len(given)}")
    like = inputs[0][1]
    assert like is not None, "the first input is always there"
    taken = [(name, tensor) for name, tensor in inputs if tensor is not None]
    count = len(taken)
    for (name, shape), tensor in zip(wanted.items(), given, strict=True):
        dtypes = {dtype or like.dtype} if len(shape) == 2 else {torch.float32}
        dtypes |= {torch.float32} if sums else set()
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{launcher}: expected {name} of out contiguous and of shape {shape}, got "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}: give rows of a contiguous matrix"
            )
        if tensor.dtype not in dtypes or tensor.device != like.device:
            words = " or ".join(sorted(map(str, dtypes)))
            raise TypeError(
                f"{launcher}: expected {name} of out in {words} on {like.device}, got {tensor.dtype} on "
                f"{tensor.device}"
            )
        _require_not_negated(launcher, f"{name} of out", tensor)
        for number, (other, its) in enumerate(taken):
            replaced = in_place and tensor is its and number < count
            if share_memory(tensor, its) and not replaced:
                raise ValueError(
                    f"{launcher}: expected {name} of out with memory of its own, got some of {other}, which "
                    "the kernel may read or write later"
                )
        taken.append((name, tensor))


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether any byte lies between the first and the last of both."""
    (start, stop), (its_start, its_stop) = _addresses(one), _addresses(other)
    return start < its_stop and its_start < stop


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """From the first byte of a tensor to behind the last one, with all between; nothing without memory."""
    start = tensor.data_ptr()
    if tensor.is_meta or not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def are_halves(first: Tensor, second: Tensor) -> bool:
    """Whether two matrices are the upper and the lower half of one, which lies in memory row by row."""
    return (
        second.data_ptr() - first.data_ptr() in (0, first.nbytes)  # quick to look at; 0 without memory
        and first.shape == second.shape
        and first.numel() > 0
        and first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and second.storage_offset() == first.storage_offset() + first.numel()
        and second.untyped_storage()._cdata == first.untyped_storage()._cdata
    )


def stacked(first: Tensor, second: Tensor) -> Tensor:
    """Return the matrix whose halves these are."""
    rows, cols = first.shape
    return first.as_strided((2 * rows, cols), (cols, 1), first.storage_offset())


def require_ids(launcher: str, name: str, ids: Tensor, like: Tensor, length: int | None = None) -> None:
    """A contiguous vector of int64 or int32, on the device of `like`; with as many elements as `length`."""
    wanted = f"{name} ({'tokens' if length is None else length},) of int64 or int32, on {like.device}"
    if not isinstance(ids, Tensor):
        raise TypeError(f"{launcher}: expected {wanted}; got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{launcher}: expected {wanted}; got {ids.dtype}")
    if ids.ndim != 1 or ids.device != like.device or length not in (None, len(ids)):
        raise ValueError(f"{launcher}: expected {wanted}; got {tuple(ids.shape)} on {ids.device}")
    if not ids.is_contiguous():
        raise ValueError(f"{launcher}: expected {wanted}, contiguous; got strides {ids.stride()}")


def require_columns(launcher: str, columns: int | None, logits: Tensor) -> int:
    """How many columns are no padding: all of them for None."""
    if columns is None:
        return logits.shape[1]
    if not 0 <= columns <= logits.shape[1]:
        raise ValueError(
            f"{launcher}: expected 0 to {logits.shape[1]} columns of logits {tuple(logits.shape)}, "
            f"got {columns}"
        )
    return columns


def require_parameter(launcher: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """A vector with an element for each feature of x, in the dtype of x or in fp32, on its device."""
    wanted = f"({x.shape[1]},), in {x.dtype} or torch.float32, on {x.device}"
    _require_vector(launcher, name, tensor, x, x.shape[1], (x.dtype, torch.float32), wanted)


def require_statistic(launcher: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """A contiguous fp32 vector with an element for each row of x, as the forward returned it."""
    wanted = f"({x.shape[0]},), in torch.float32 and contiguous, on {x.device}, as the forward returned it"
    _require_vector(launcher, name, tensor, x, x.shape[0], (torch.float32,), wanted)
    if not tensor.is_contiguous():
        raise ValueError(f"{launcher}: expected {name} of {wanted}; got strides {tensor.stride()}")


def _require_vector(
    launcher: str,
    name: str,
    tensor: Tensor,
    x: Tensor,
    length: int,
    dtypes: tuple[torch.dtype, ...],
    wanted: str,
) -> None:
    require_tensors(launcher, (name, tensor))
    if tensor.dtype not in dtypes:
        raise TypeError(f"{launcher}: expected {name} of {wanted}; got {tensor.dtype}")
    if tuple(tensor.shape) != (length,) or tensor.device != x.device:
        raise ValueError(
            f"{launcher}: expected {name} of {wanted}; got {tuple(tensor.shape)} on {tensor.device}"
        )
