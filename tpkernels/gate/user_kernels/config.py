"""What is checked together: a gate.toml, or the kernels that a Python file registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpkernels.files import read_text
from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.causes import SEVERITIES, Severity
from tpkernels.gate.compile_gate import Suite
from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.entries import Inspected, entry_of
from tpkernels.gate.user_kernels.record import ConfigError, FunctionPath, OwnKernel
from tpkernels.gate.user_kernels.table import own_kernel

RECORDING = "tpkernels.gate.user_kernels.recording"
# what a launch of today says, in place of the table
LAUNCHED = (
    *("signature", "constants", "values", "strides", "grid", "num_warps", "num_stages", "options", "aligned"),
)
FAILS: Severity = "worse"


@dataclass(frozen=True, slots=True)
class Config:
    """Kernels with their budgets, and more numeric cases than their tables have oracles.

    cases: a function that returns `gate.numerics.NumericCase`s
    """

    path: Path
    budgets: Path
    kernels: tuple[OwnKernel, ...]
    fails: Severity = FAILS  # the least that makes `check --compare` red
    imported: bool = False  # whether modules may be imported in this process: they are this package's
    cases: FunctionPath | None = None
    notes: tuple[str, ...] = ()  # how launches of today differ from the tables

    @property
    def results(self) -> Path:
        """Where results are recorded: beside the budgets."""
        return self.budgets.with_name(f"{self.path.stem}-results.json")

    @property
    def folder(self) -> Path | None:
        """Modules are looked for there first."""
        return None if self.imported else self.path.parent

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
        if key not in ("budgets", "run", "compare", "kernels"):
            raise ConfigError(f"{path}: {key}", "unknown; known are budgets, run, compare, kernels")
    budgets, run = tables.get("budgets", f"{path.stem}-budgets.json"), tables.get("run", "")
    kernels = tables.get("kernels")
    for key, text, what in (("budgets", budgets, "the path of a file"), ("run", run, "a command")):
        if not isinstance(text, str):
            raise ConfigError(f"{path}: {key}", f"expected {what}, got {text!r}")
    if not isinstance(kernels, Mapping) or not kernels:
        raise ConfigError(f"{path}: kernels", "expected tables such as [kernels.softmax], got none")
    own = tuple(_kernel(path, *pair) for pair in kernels.items())
    now = tuple(_as_launched(path, run, own)) if run else own
    notes = tuple(
        f"{run!r} launches {was.name} {told}"
        for was, one in zip(own, now, strict=True)
        if (told := _otherwise(was, one))
    )
    fails = _fails(path, tables.get("compare", {}))
    return Config(path, path.parent / budgets, now, fails, notes=notes)


def _otherwise(was: OwnKernel, now: OwnKernel) -> str:
    """What a launch changed: "with num_stages 1, was 2"."""
    before, after = (
        {**one.constants, **one.options, "num_warps": one.num_warps, "num_stages": one.num_stages}
        for one in (was, now)
    )
    names = [name for name in before | after if before.get(name) != after.get(name)]
    changed = ", ".join(f"{name} {after.get(name)}, was {before.get(name)}" for name in names)
    return f"with {changed}" if changed else ""


def _as_launched(path: Path, run: str, kernels: Sequence[OwnKernel]) -> Iterator[OwnKernel]:
    """Kernels as they are launched today, by `run`: another number of warps in a config shows so."""
    (answer,) = children.answers(RECORDING, path.parent, [{"run": run}])
    if isinstance(answer, str):
        raise ConfigError(f"{path}: run", f"{run!r} {answer}")
    for own in kernels:
        table = own.as_table()
        for one in answer["launches"]:
            if one["kernel"] == own.kernel and _operands(one["table"]) == _operands(table):
                told = {key: one["table"][key] for key in LAUNCHED if one["table"].get(key)}
                yield _kernel(
                    path, own.name, {key: table[key] for key in table if key not in LAUNCHED} | told
                )
                break
        else:
            ended = f" (it ended with {answer['ended']})" if answer["ended"] else ""
            reason = f"{run!r} launches it no more with such types and shapes{ended}: write its table anew"
            raise ConfigError(f"{path}: kernels.{own.name}", reason)


def _operands(table: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Types, without the blocks of descriptors, which are a config's business, and shapes."""
    kinds = {name: kind.partition("[")[0] for name, kind in table["signature"].items()}
    return kinds, {name: [*shape] for name, shape in table["shapes"].items()}


def _fails(path: Path, table: Any) -> Severity:
    """What [compare] says."""
    for severity in SEVERITIES[1:]:
        if table in ({}, {"fails": severity}):
            return severity if table else FAILS
    expected = ", ".join(f'"{severity}"' for severity in SEVERITIES[1:])
    raise ConfigError(f"{path}: compare", f"expected fails = one of {expected}; got {table!r}")


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
    (answer,) = children.answers(children.__name__, path.parent, [{"module": path.stem}])
    if isinstance(answer, str):
        raise ValueError(f"importing it {answer}")
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    return {"kernels": answer["kernels"]}


def suite_of(chosen: Config) -> Suite:
    """The kernels of a config, ready to compile; ConfigError says what is wrong in what it names."""
    entries = {entry.name: entry for entry in _entries(chosen)}
    return Suite(chosen.path.name, entries, chosen.budgets)


def _entries(chosen: Config) -> Iterable[Entry]:
    for own, kernel in inspect_kernels(chosen.kernels, chosen.folder):
        try:
            if isinstance(kernel, ConfigError):
                raise kernel
            yield entry_of(own, kernel, chosen.folder)
        except ConfigError as error:
            raise chosen.mistake(own, error) from error


def inspect_kernels(
    kernels: Iterable[OwnKernel], folder: Path | None
) -> Iterable[tuple[OwnKernel, Inspected | ConfigError]]:
    """Each kernel with what it says of itself, or with what is wrong in its table."""
    own = list(kernels)
    items = [{"kernel": one.kernel, "oracle": one.oracle, "folder": str(folder or "")} for one in own]
    if folder is None:
        told: Iterable[children.Answer | str] = map(children.answered, items)
    else:
        told = children.answers(children.__name__, folder, items)
    for one, answer in zip(own, told, strict=True):
        if isinstance(answer, str):
            yield one, ConfigError("kernel", f"importing {one.kernel.split(':')[0]!r} {answer}")
        elif "mistake" in answer:
            yield one, ConfigError(*answer["mistake"].split(": ", 1))
        else:
            lists = {name: tuple(said) for name, said in answer.items() if isinstance(said, list)}
            yield one, Inspected(**answer | lists)
