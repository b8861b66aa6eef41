"""A gate.toml, or a Python file that registers kernels: what is to be checked, and what checks it.

A kernel of others as the clock launches it: at the sizes of its table, or a few tiles on one SM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.files import read_text
from tpkernels.gate.ahead_of_time import Entry, Facts
from tpkernels.gate.catalog import has_parts
from tpkernels.gate.clock.launch import Built, SmLaunch, launch_of
from tpkernels.gate.clock.workload import Product
from tpkernels.gate.compile_gate import Suite
from tpkernels.gate.numerics import Computed
from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.entries import entry_of, inspect_kernels
from tpkernels.gate.user_kernels.record import DTYPES, ConfigError, OwnKernel, TensorType, Values, violations
from tpkernels.gate.user_kernels.table import own_kernel


@dataclass(frozen=True)
class OwnWorkload:
    """A workload, see `gate.clock.workload`, and what names it in the cache, see `gate.clocking`."""

    own: OwnKernel
    arguments: tuple[str, ...]  # that are not compiled in, in order
    unit: int = 1
    group: int = 1

    def text(self) -> str:
        return repr(self)

    def workload(self) -> OwnWorkload:
        return self

    @property
    def name(self) -> str:
        return self.own.name

    @cached_property
    def product(self) -> Product | None:
        if not self.own.tile:
            return None
        rows, cols, depth = self.own.blocks.values()
        operand = next(iter(self.own.tensors.values()))
        return Product(rows, cols, depth, _dtype(operand).itemsize)

    @property
    def shape(self) -> tuple[int, int, int]:
        if not self.own.tile:
            return 0, 0, 0
        rows, cols, depth = (self.own.sizes[name] for name in self.own.blocks)
        return rows, cols, depth

    @property
    def tiles(self) -> int:
        if self.product is None:
            return prod(self._values.grid)
        rows, cols, _ = self.shape
        return -(-rows // self.product.rows) * -(-cols // self.product.cols)

    @property
    def traffic(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(self._values).values())

    @property
    def least(self) -> int:
        return 0  # a kernel of others may leave parts of its tensors alone

    @property
    def persistent(self) -> bool:
        """Whether the grid asks how many processors there are."""
        return self.own.at(self.own.sizes, processors=1).grid != self._values.grid

    def on_one(self, built: Built, tiles: int, steps: int) -> SmLaunch:
        if not self.own.tile:
            return launch_of(built, list(self._passed(self._values)), self._values.grid, tiles)
        values = self.own.at(self.own.of_tiles(tiles, steps), processors=1)
        return launch_of(built, list(self._passed(values)), values.grid)

    @cached_property
    def _values(self) -> Values:
        return self.own.at(self.own.sizes)

    def _tensors(self, values: Values) -> dict[str, Tensor]:
        return {
            name: torch.empty_strided(
                values.shapes[name], values.strides[name], dtype=_dtype(kind), device="meta"
            )
            for name, kind in self.own.tensors.items()
        }

    def _passed(self, values: Values) -> Iterator[Tensor | TensorDescriptor | int | float]:
        tensors = self._tensors(values)
        for name in self.arguments:
            if name not in tensors:
                yield values.numbers[name]
            elif block := self.own.tensors[name].block:
                tensor = tensors[name]
                yield TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
            else:
                yield tensors[name]


def _dtype(kind: TensorType) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[kind.dtype])
    return found


Compute = Callable[[str, Callable[[str], None]], list[Computed]]  # as `gate.numerics.check`


@dataclass(frozen=True, slots=True)
class Config:
    path: Path
    budgets: Path
    kernels: tuple[OwnKernel, ...]

    @property
    def folder(self) -> Path:
        """Modules are looked for there first."""
        return self.path.parent

    def mistake(self, own: OwnKernel, error: object) -> ConfigError:
        return ConfigError(f"{self.path}: kernels.{own.name}", error)


def read(path: Path) -> Config:
    """ConfigError names file and key of what is wrong."""
    path = path.absolute()
    try:
        tables = _registered(path) if path.suffix == ".py" else parsed(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(str(path), reason) from error
    for key in tables:
        if key not in ("budgets", "kernels"):
            raise ConfigError(f"{path}: {key}", "unknown; known are budgets, kernels")
    budgets, kernels = tables.get("budgets", f"{path.stem}-budgets.json"), tables.get("kernels")
    if not isinstance(budgets, str):
        raise ConfigError(f"{path}: budgets", f"expected the path of a file, got {budgets!r}")
    if not isinstance(kernels, Mapping) or not kernels:
        raise ConfigError(f"{path}: kernels", "expected tables such as [kernels.softmax], got none")
    return Config(path, path.parent / budgets, tuple(_kernel(path, *pair) for pair in kernels.items()))


def _kernel(path: Path, name: str, table: Any) -> OwnKernel:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: kernels.{name}", f"expected a table, got {table!r}")
    try:
        return own_kernel(name, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: kernels.{name}", error) from error


def parsed(path: Path) -> Mapping[str, Any]:
    """The tables of a TOML file."""
    reader = next((name for name in ("tomllib", "tomli") if find_spec(name)), None)
    if reader is None:
        raise ValueError("reading TOML takes Python 3.11, or `pip install tomli`")
    tables: Mapping[str, Any] = import_module(reader).loads(read_text(path))
    return tables


def _registered(path: Path) -> Mapping[str, Any]:
    read_text(path)
    if not path.stem.isidentifier():
        raise ValueError(f"a module of this name cannot be imported: {path.stem!r}")
    program, items = "tpkernels.gate.user_kernels.children", [{"module": path.stem}]
    (answer,) = children.answers(program, path.parent, items)
    if isinstance(answer, str):
        raise ValueError(f"importing it {answer}")
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    return answer


def suite_of(path: Path) -> tuple[Suite, Compute]:
    """The kernels of a config as a suite, and what computes them.

    ConfigError names file and key of what is wrong, in the config or in what it names.
    """
    chosen = read(path)
    entries = {entry.name: entry for entry in _entries(chosen)}
    architectures = {name: entry.architectures for name, entry in entries.items()}
    kernels = {own.name: own for own in chosen.kernels}

    def rules(entry: Entry, architecture: str, facts: Facts) -> Iterable[str]:
        return violations(kernels[entry.name].rules, architecture, facts)

    def launching(entry: Entry) -> OwnWorkload | None:
        own = kernels[entry.name]
        return OwnWorkload(own, tuple(entry.arguments)) if own.sizes else None

    suite = Suite(chosen.path.name, architectures, entries.__getitem__, chosen.budgets, rules, launching)
    return suite, partial(_compute, chosen)


def _entries(chosen: Config) -> Iterable[Entry]:
    for own, kernel in inspect_kernels(chosen.kernels, chosen.folder):
        try:
            if isinstance(kernel, ConfigError):
                raise kernel
            yield entry_of(own, kernel, chosen.folder)
        except ConfigError as error:
            raise chosen.mistake(own, error) from error


def _compute(chosen: Config, only: str, report: Callable[[str], None]) -> list[Computed]:
    """Each case that `only` names, see `has_parts`. None is remembered: oracles import anything."""
    cases = [
        (own, number)
        for own in chosen.kernels
        if has_parts(own.name, only)
        for number in range(len(own.computed))
    ]
    items = [{"name": own.name, "table": own.as_table(), "sizes": number} for own, number in cases]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    told = children.answers("tpkernels.gate.user_kernels.numerics", chosen.folder, items, variables)
    computed = []
    for (own, number), answer in zip(cases, told, strict=True):
        if isinstance(answer, str):
            answer = {"error": None, "failure": answer}
        elif "mistake" in answer:
            raise chosen.mistake(own, answer["mistake"])
        sizes = ",".join(f"{name}={size}" for name, size in own.computed[number].items())
        case = f"{own.name}/{sizes}" if sizes else own.name
        error = float("nan") if answer["error"] is None else answer["error"]
        computed.append(Computed(case, error, answer["failure"]))
        report(case)
    return computed
