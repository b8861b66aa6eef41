"""A gate.toml, or a Python file that registers kernels: what is to be checked, and where its budgets are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpkernels.files import read_text
from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.record import ConfigError, OwnKernel
from tpkernels.gate.user_kernels.table import own_kernel


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
        if key not in ("budgets", "kernels", "streams"):  # the last of `check --streams`
            raise ConfigError(f"{path}: {key}", "unknown; known are budgets, kernels, streams")
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
    (answer,) = children.answers(
        "tpkernels.gate.user_kernels.registered", path.parent, [{"module": path.stem}]
    )
    if isinstance(answer, str):
        raise ValueError(f"importing it {answer}")
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    return answer
