"""Registered kernels as entries, which are compiled, cached and judged."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.gate.ahead_of_time import Constant, Entry, undecorated
from tpkernels.gate.user_kernels.record import DTYPES, ConfigError, OwnKernel, Values

if TYPE_CHECKING:  # the gate itself, which makes entries, does without torch
    import torch
    from torch import Tensor
    from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the kernel says itself."""

    arguments: tuple[str, ...]  # in its order
    constexprs: tuple[str, ...]
    defaults: Mapping[str, Constant]
    plain: tuple[str, ...]  # which Triton is told nothing of
    unaligned: tuple[str, ...]  # of which it is not told that they are multiples of 16
    place: str = field(default="", compare=False)  # file and line of its `def`
    sources: str = field(default="", compare=False)  # a hash of all files that it comes from; "": not known

    @staticmethod
    def of(kernel: Any, folder: str = "") -> Inspected:
        """kernel: under `triton.jit`; of one that is interpreted names of arguments are all that is known

        folder: a user's, where it may lie
        """
        parameters = getattr(kernel, "params", ())
        simple = bool | int | float | str | None
        return Inspected(
            arguments=tuple(kernel.arg_names),
            constexprs=tuple(one.name for one in parameters if one.is_constexpr),
            defaults={
                one.name: one.default
                for one in parameters
                if one.has_default and isinstance(one.default, simple)
            },
            plain=tuple(one.name for one in parameters if one.do_not_specialize),
            unaligned=tuple(one.name for one in parameters if one.do_not_specialize_on_alignment),
            place=place_of(kernel, folder) if folder else "",
        )

    @property
    def untold(self) -> tuple[str, ...]:
        return self.plain + self.unaligned


def place_of(kernel: Any, folder: str) -> str:
    """Return file and line of a kernel's `def`: "pkg/kernels.py:12". folder: that the file may lie in"""
    return _place_of(undecorated(kernel).fn, folder)


@cache
def _place_of(function: Any, folder: str) -> str:
    lines, first = inspect.getsourcelines(function)
    above = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    path = Path(inspect.getfile(function))
    if folder and path.is_relative_to(folder):
        return f"{path.relative_to(folder)}:{first + above}"
    return f"{'/'.join(path.parts[-1 - function.__module__.count('.') :])}:{first + above}"


def entry_of(own: OwnKernel, kernel: Inspected, folder: Path | None) -> Entry:
    """What is compiled; ConfigError if table and kernel disagree."""
    constants = _constants(own, kernel)
    module, function = own.kernel.split(":")
    values = own.at(own.sizes) if own.sizes or own.grid else None
    return Entry(
        name=own.name,
        module=module,
        function=function,
        form="descriptor" if any(kind.block for kind in own.tensors.values()) else "pointer",
        arguments={name: own.signature[name] for name in kernel.arguments if name in own.signature},
        aligned=frozenset(_aligned(own, kernel, values)),
        constants={name: constant_of_toml(value) for name, value in constants.items()},
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        architectures=own.architectures,
        unspecialised=frozenset(kernel.untold),
        folder=str(folder or ""),
        more_options=own.options,
        rules=own.rules,
        place=kernel.place,
        sources=kernel.sources,
    )


def _constants(own: OwnKernel, kernel: Inspected) -> dict[str, Constant]:
    """The constants of the table, and the kernel's defaults of those that it leaves out."""
    has = f"{own.kernel} has {', '.join(kernel.arguments) or 'none'}"
    for key in ("signature", "constants"):
        for name in getattr(own, key):
            if name not in kernel.arguments:
                raise ConfigError(f"{key}.{name}", f"is no argument: {has}")
    for name in own.signature:
        if name in kernel.constexprs:
            raise ConfigError(f"signature.{name}", "is a tl.constexpr: give its value in constants")
    constants = dict(own.constants)
    for name in kernel.arguments:
        if name not in own.signature and name not in constants:
            if name not in kernel.defaults:
                key = "constants" if name in kernel.constexprs else "signature"
                raise ConfigError(key, f"lacks {name!r}: {has}")
            constants[name] = kernel.defaults[name]
    return constants


def _aligned(own: OwnKernel, kernel: Inspected, values: Values | None) -> list[str]:
    """What the table says; else what Triton finds at a launch: torch's tensors are, and integers by value."""
    numbers = values.numbers if values else {}
    for name, number in numbers.items():
        if type(number) is int and number == 1 and name not in kernel.plain and own.signature[name] != "i1":
            reason = "is 1, which Triton compiles in at a launch: move it from signature to constants"
            raise ConfigError(f"values.{name}", reason)
    whole = {name for name, number in numbers.items() if type(number) is int and number % 16 == 0}
    if own.aligned is not None:
        for name in own.aligned:
            if name in numbers and name not in whole:
                raise ConfigError("aligned", f"{name} = {numbers[name]} is no multiple of 16 in sizes")
        return list(own.aligned)
    pointers = {name for name, kind in own.tensors.items() if not kind.block}
    return [name for name in own.signature if name in pointers | whole and name not in kernel.untold]


def passed(own: OwnKernel, name: str, tensor: Tensor) -> Tensor | TensorDescriptor:
    """A tensor as the kernel's signature wants it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = own.tensors[name].block
    return (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block)) if block else tensor
    )


def dtype_of(name: str) -> torch.dtype:
    """name: Triton's"""
    import torch

    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def constant_of_toml(value: Constant) -> Any:
    """TOML has no None and no dtype: "None", "tl.float32" and "torch.float32" stand for them."""
    if value == "None":
        return None
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."), value)
    if isinstance(value, str) and value.startswith("torch."):
        import torch

        return getattr(torch, value.removeprefix("torch."), value)
    return value
