"""Numbers: kernels and launchers, interpreted, against float64.

`check` computes each case in a process of its own kind (`user_kernels/numerics.py`, with TRITON_INTERPRET=1).

How far off a kernel may be, and frames that show what it left unwritten or wrote too much, are shared with
the tests, so that the two cannot come to mean different things.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tpkernels.gate.child import one_line_error
from tpkernels.gate.computing import Computed

# norm-wise, against float64: about one and a half correct roundings of the result, on average over its
# elements. So a result must have some hundreds: a single one may round by up to 3.9e-3 in bf16
BOUND: Mapping[torch.dtype, float] = {torch.float32: 3e-7, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}
# of a kernel in bf16 whose bf16 is made fp32: sums in fp16 are off by 1e-4 and more
WIDE_BOUND = 1e-5
SEED = 20261121

Results = Mapping[str, tuple[Tensor | None, Tensor]]  # what -> (computed, exact)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖; 0 for two empty tensors, infinite for different shapes."""
    if actual.shape != exact.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - exact.double()).norm()
    return float(difference / exact.double().norm().clamp_min(1e-300))


@dataclass(frozen=True)
class _Frame:
    """A view of a buffer, with the buffer as it was."""

    name: str
    is_output: bool
    view: Tensor
    buffer: Tensor
    before: Tensor

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where the buffer begins, the view begins, the view ends, and the buffer ends."""
        first, size, start = self.view.data_ptr(), self.buffer.element_size(), self.buffer.data_ptr()
        steps = zip(self.view.shape, self.view.stride(), strict=True)
        reach = 1 + sum((length - 1) * step for length, step in steps) if self.view.numel() else 0
        return start, first, first + reach * size, start + self.buffer.numel() * size

    def faults(self) -> Iterator[str]:
        after, before = self.buffer.clone(), self.before.clone()
        inside = [self._view_of(one).clone(memory_format=torch.contiguous_format) for one in (after, before)]
        for one in (after, before):
            self._view_of(one).zero_()
        if not torch.equal(_bits(after), _bits(before)):  # around the view, or between its rows
            yield f"written outside {self.name}"
        if not self.is_output and not torch.equal(*map(_bits, inside)):
            yield f"writes into {self.name}, which is none of its outputs"

    def _view_of(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


def outside(dtype: torch.dtype) -> float | int | bool:
    """The number around a view, which nobody should read: NaN, or the largest integer."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


class Frames:
    """Allocates tensors in frames of NaN, which must not be written; outputs are NaN, to be overwritten."""

    MARGIN = 64  # elements; keeps the 16-byte alignment that descriptors need

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self._strayed: dict[str, None] = {}  # in the order of accesses
        self._uses: set[tuple[str, str]] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        content = torch.full(shape, outside(dtype), dtype=dtype, device=device)
        return self.hold("an output", True, content, content.stride(), self.MARGIN)

    def hold(
        self, name: str, is_output: bool, values: Tensor, strides: tuple[int, ...], margin: int
    ) -> Tensor:
        """Return a tensor of these values and strides. margin: elements on each side"""
        reach = 1 + sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True))
        size = max(0, reach) + 2 * margin
        buffer = torch.full((size,), outside(values.dtype), dtype=values.dtype, device=values.device)
        view = buffer.as_strided(values.shape, strides, margin)
        view.copy_(values)
        self._frames.append(_Frame(name, is_output, view, buffer, buffer.clone()))
        return view

    def accessed(self, how: str, addresses: npt.NDArray[np.uint64], inside: npt.NDArray[np.bool_]) -> None:
        """Note accesses next to a tensor. how: "read" or "written"; inside: which addresses are accessed"""
        reached = addresses[np.broadcast_to(inside, addresses.shape)]
        if not reached.size:
            return
        low, high = int(reached.min()), int(reached.max())
        for frame in self._frames:
            _, first, end, _ = frame.addresses
            if first <= low and high < end:
                self._uses.add((how, frame.name))
                return
        for frame in self._frames:
            start, first, end, stop = frame.addresses
            before, after = (reached >= start) & (reached < first), (reached >= end) & (reached < stop)
            if before.any() or after.any():
                self._strayed[f"{how} outside {frame.name}{_line_of_kernel()}"] = None

    def take_uses(self) -> set[tuple[str, str]]:
        """Uses of each tensor since the last call: ("read", "x_ptr"). Atomics are seen by their effect."""
        taken, self._uses = self._uses, set()
        for frame in self._frames:
            if ("written", frame.name) not in taken and not torch.equal(
                *map(_bits, (frame.buffer, frame.before))
            ):
                taken |= {("read", frame.name), ("written", frame.name)}
        return taken

    def take_faults(self) -> list[str]:
        """What was read or written that should not be, since the last call, each kind once."""
        (taken, self._frames), (strayed, self._strayed) = (self._frames, []), (list(self._strayed), {})
        faults = dict.fromkeys(fault for frame in taken for fault in frame.faults())
        return strayed + [fault for fault in faults if not any(fault in one for one in strayed)]


def _line_of_kernel() -> str:
    """Return the file and line of the kernel that accesses memory now, in brackets."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(("triton.", "tpkernels.gate.", "tpkernels.kernels.interpret")):
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


@dataclass(frozen=True)
class NumericCase:
    """What a launcher or a kernel computes, and the truth."""

    name: str  # "dgrad_act/descriptor/bf16/silu", starting with the launcher's name
    run: Callable[[], Results]
    bounds: Mapping[torch.dtype, float] = field(default_factory=lambda: BOUND)


def examine(case: NumericCase, frames: Frames) -> Computed:
    """frames: that the tensors of the case are allocated in"""
    try:
        results = case.run()
    except Exception as error:  # a kernel that does not run is a finding
        frames.take_faults()
        return Computed(case.name, float("nan"), one_line_error(error))
    errors = {what: _part_of_bound(*pair, case.bounds) for what, pair in results.items()}
    off = {what: error for what, error in errors.items() if not error < 1}
    failures = [f"{what} {_mismatch(*results[what], error)}" for what, error in off.items()]
    largest = max(errors.values(), key=lambda error: (error != error, error))  # NaN above all numbers
    return Computed(case.name, largest, "; ".join([*frames.take_faults(), *failures]))


def _part_of_bound(actual: Tensor | None, exact: Tensor, bounds: Mapping[torch.dtype, float]) -> float:
    """‖actual - exact‖ / ‖exact‖ over what the dtype is allowed; NaN where a value is missing."""
    if actual is None or actual.shape != exact.shape:
        return float("nan")
    if not actual.dtype.is_floating_point:
        return float((actual != exact).any())
    return relative_error(actual, exact) / bounds[actual.dtype]


def _mismatch(actual: Tensor | None, exact: Tensor, error: float) -> str:
    if actual is None:
        return "is missing"
    if actual.shape != exact.shape:
        return f"has shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if not actual.dtype.is_floating_point:
        return f"differs in {int((actual != exact).sum())} of {actual.numel()} elements"
    return f"is off by {error:.3g} times the bound" if error == error else "holds NaN"
