"""What Triton derives at launch, read off a launch that is recorded on the meta device.

Triton compiles a kernel anew for other types of its run-time arguments, for integers that are 1, and for
addresses and integers that are multiples of 16; without the latter it silently drops pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.launchers import Operands
from tpkernels.kernels import launch, launch_plans
from tpkernels.kernels.footprints import SHORT_NAMES
from tpkernels.kernels.target import Target
from tpkernels.kernels.triton_versions import GLUON_SINCE, LAUNCH_OPTIONS, triton_version

HAS_GLUON = triton_version() >= GLUON_SINCE  # before it: of another form
DESCRIPTORS = (TensorDescriptor, GluonDescriptor)
TYPE_NAMES = {**SHORT_NAMES, torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True, slots=True)
class MetaOperands(Operands):
    """Without memory; `ragged` addresses are multiples of nothing, others of 16."""

    ragged: bool = False

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.empty(shape, dtype or self.dtype, torch.device("meta"))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Takes the place of `launch.allocate`."""
        flat = torch.empty(prod(shape) + 1, dtype=dtype, device=device)
        return flat[self.ragged :][: prod(shape)].view(shape)


class _Found(Exception):
    """Ends a recording: what is computed after the launch, such as what is exact, is not asked for."""

    def __init__(self, launch: launch.Launch) -> None:
        super().__init__()
        self.launch = launch


class _Wanted(list[launch.Launch]):
    """Launches up to the one that is looked for, of a kernel of this name; "": the first."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def append(self, one: launch.Launch) -> None:
        if self.function in ("", one.kernel.__name__):
            raise _Found(one)


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """How an entry's launch is recorded."""

    name: str  # of the entry
    call: Callable[[MetaOperands], object]
    of: MetaOperands
    target: Target
    architectures: tuple[str, ...]
    function: str = ""  # of what `call` launches, the first that is this kernel; "": the first
    precision: Literal["ieee", "tf32"] = "ieee"

    def launch(self) -> launch.Launch:
        """What the kernel is launched with."""
        wanted = _Wanted(self.function)
        try:
            with _launching_with(self.of, self.precision), launch.recording(self.target, wanted):
                self.call(self.of)
        except _Found as found:
            return found.launch
        raise LookupError(f"{self.name}: {self.function} was not launched")

    def entry(self) -> Entry:
        """What is compiled of it."""
        first = self.launch()
        arguments: dict[str, str] = {}
        constants = dict(first.constants)
        options = {name: constants.pop(name) for name in ("num_ctas",) if name in constants}
        aligned: set[str] = set()
        parameters = getattr(first.kernel, "params", ())  # of one that is interpreted there are none
        plain = frozenset(one.name for one in parameters if one.do_not_specialize)
        unaligned = plain.union(one.name for one in parameters if one.do_not_specialize_on_alignment)
        for argument, value in zip(first.kernel.arg_names, first.arguments, strict=False):
            if type(value) is int and value == 1 and argument not in plain:
                constants[argument] = value
                continue
            arguments[argument] = _type_of(value)
            if _is_aligned(value) and argument not in unaligned:
                aligned.add(argument)
        return Entry(
            name=self.name,
            module=first.kernel.fn.__module__,
            function=first.kernel.__name__,
            form="descriptor" if any(isinstance(a, DESCRIPTORS) for a in first.arguments) else "pointer",
            arguments=arguments,
            aligned=frozenset(aligned),
            num_warps=constants.pop("num_warps", 4),
            num_stages=constants.pop("num_stages", None),
            constants=constants,
            architectures=self.architectures,
            unspecialised=unaligned,
            more_options={**LAUNCH_OPTIONS, **options},
        )


def recorded(
    name: str,
    call: Callable[[MetaOperands], object],
    of: MetaOperands,
    target: Target,
    architectures: tuple[str, ...],
    function: str = "",
    precision: Literal["ieee", "tf32"] = "ieee",
) -> Entry:
    """The entry of the first kernel that `call` launches on `target`, or of the first that is `function`."""
    return EntrySpec(name, call, of, target, architectures, function, precision).entry()


def _type_of(value: Tensor | TensorDescriptor | GluonDescriptor | int | float) -> str:
    """Triton's name of an argument's type; a test holds it to Triton's own answer."""
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{TYPE_NAMES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPE_NAMES[value.base.dtype]}{value.block_shape}>"
    if isinstance(value, Tensor):
        return f"*{TYPE_NAMES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Tensor | TensorDescriptor | GluonDescriptor | int | float) -> bool:
    """Whether Triton is told of a multiple of 16; a descriptor is aligned by itself."""
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


@contextmanager
def _launching_with(of: MetaOperands, precision: str) -> Iterator[None]:
    """Outputs are made as operands are, and fp32 is multiplied in `precision`, whatever torch is set to."""
    matmul: Any = torch.backends.cuda.matmul
    before = launch.allocate, matmul.fp32_precision
    launch.allocate, matmul.fp32_precision = of.empty, precision
    launch_plans.forget()  # no key has how results lie
    try:
        yield
    finally:
        launch.allocate, matmul.fp32_precision = before
        launch_plans.forget()
