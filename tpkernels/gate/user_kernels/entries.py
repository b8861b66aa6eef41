"""Kernels of others as entries, which compile, are cached and judged as ours are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tpkernels.gate.ahead_of_time import Constant, Entry
from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.record import ConfigError, OwnKernel, Values


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the kernel says itself."""

    arguments: tuple[str, ...]  # in its order
    constexprs: tuple[str, ...]
    defaults: Mapping[str, Constant]
    plain: tuple[str, ...]  # which Triton is told nothing of
    unaligned: tuple[str, ...]  # of which it is not told that they are multiples of 16

    @property
    def untold(self) -> tuple[str, ...]:
        return self.plain + self.unaligned


InspectedKernel: TypeAlias = "tuple[OwnKernel, Inspected | ConfigError]"


def inspect_kernels(kernels: Iterable[OwnKernel], folder: Path) -> Iterable[InspectedKernel]:
    """Each kernel with what it says of itself, or with what is wrong in its table."""
    own = list(kernels)
    items = [{"kernel": one.kernel, "oracle": one.oracle} for one in own]
    told = children.answers("tpkernels.gate.user_kernels.children", folder, items)
    for one, answer in zip(own, told, strict=True):
        if isinstance(answer, str):
            yield one, ConfigError("kernel", f"importing {one.kernel.split(':')[0]!r} {answer}")
        elif "mistake" in answer:
            yield one, ConfigError(*answer["mistake"].split(": ", 1))
        else:
            lists = {name: tuple(said) for name, said in answer.items() if isinstance(said, list)}
            yield one, Inspected(**answer | lists)


def entry_of(own: OwnKernel, kernel: Inspected, folder: Path) -> Entry:
    """What is compiled; ConfigError if table and kernel disagree."""
    constants = _constants(own, kernel)
    module, function = own.kernel.split(":")
    values = own.at(own.sizes) if own.sizes else None
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
        folder=str(folder),
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


def constant_of_toml(value: Constant) -> Any:
    """TOML has no None and no dtype: "None" and "tl.float32" stand for them."""
    if value == "None":
        return None
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."), value)
    return value
