"""`python -m tpkernels check --streams`: executes ranks' programs in many orders without a GPU.

The programs are our operators over every transport, eager and captured; with --config those of a gate.toml.
An order with a race, a deadlock or other results is a failure; its seed reproduces it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tpkernels.cli import SAID_EVERY, BadUse, Progress, write_json
from tpkernels.gate.compile_gate import has_parts
from tpkernels.gate.user_kernels.config import parsed
from tpkernels.gate.user_kernels.record import ConfigError
from tpkernels.gate.workers import results_of

ORDERS = 10  # of each of our programs: more than 2,000 in all
PROCESSES = 2
_KEYS = ("program", "ranks", "machines", "processors", "models", "orders", "waves")


@dataclass(frozen=True)
class Searched:
    """The result of searching the orders of one program."""

    name: str
    orders: int
    tasks: int = 0  # that all ranks have enqueued
    steps: int = 0  # of all orders
    failure: str = ""


@dataclass(frozen=True)
class UserProgram:
    """A table [streams.NAME] of a gate.toml."""

    name: str
    folder: str  # the first folder to search for modules
    program: str  # module:function, a rank's host code: takes its group, returns tensors
    ranks: int
    machines: int = 1
    processors: int = 8
    models: str = ""  # module:table, of models of kernels by name
    orders: int = 200
    waves: bool = False  # whether products must leave processors to collectives in flight


def programs_of(path: Path) -> list[UserProgram]:
    """Return the programs of a gate.toml; raise ConfigError if it is invalid."""
    path = path.absolute()
    try:
        tables = parsed(path).get("streams")
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), error.strerror if isinstance(error, OSError) else error) from error
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigError(f"{path}: streams", "expected tables such as [streams.ring], got none")
    return [_user_program(path, name, table) for name, table in tables.items()]


def _user_program(path: Path, name: str, table: Any) -> UserProgram:
    where = f"{path}: streams.{name}"
    if not isinstance(table, Mapping):
        raise ConfigError(where, f"expected a table, got {table!r}")
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{where}.{key}", f"unknown; known are {', '.join(_KEYS)}")
    for key in ("program", "models"):
        value = table.get(key, "a:b" if key == "models" else None)
        if not isinstance(value, str) or value.count(":") != 1:
            raise ConfigError(f"{where}.{key}", f"expected module:name, got {value!r}")
    for key in ("ranks", "machines", "processors", "orders"):
        value = table.get(key, 1 if key != "ranks" else None)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}.{key}", f"expected a whole number of at least 1, got {value!r}")
    if type(table.get("waves", False)) is not bool:
        raise ConfigError(f"{where}.waves", f"expected true or false, got {table['waves']!r}")
    if table["ranks"] % table.get("machines", 1):
        raise ConfigError(f"{where}.machines", f"expected a divisor of {table['ranks']} ranks")
    return UserProgram(name, str(path.parent), **table)


def main(only: str, config: Path | None, orders: int | None, json_path: Path | None) -> int:
    """Search all orders and print the results; return 1 if there is a failure."""
    start = time.perf_counter()
    searches: dict[str, Callable[[], Searched]]
    if config is None:
        from bench.streams.cases import all_programs

        searches = {name: partial(_ours, name, orders or ORDERS) for name in all_programs()}
    else:
        searches = {one.name: partial(_users, one, orders or one.orders) for one in programs_of(config)}
    names = [name for name in searches if has_parts(name, only)]
    if not names:
        raise BadUse(f"no program of streams has {only!r} in its name")
    work = [searches[name] for name in names]
    with Progress("searching orders", len(names), seconds=SAID_EVERY) as step:
        dead = Searched("", 0, failure="its process died")
        found = results_of(_run, work, PROCESSES, lambda _: step(""), dead)
    return _tell(dict(zip(names, found, strict=True)), time.perf_counter() - start, json_path)


def _run(search: Callable[[], Searched]) -> Searched:
    return search()


def _ours(name: str, orders: int) -> Searched:
    from bench.streams.cases import all_programs

    return _searched(name, orders, all_programs()[name], waves=True)


def _users(one: UserProgram, orders: int) -> Searched:
    from bench.streams.record import Machine, record

    def recorded() -> tuple[Any, None]:
        sys.path.insert(0, one.folder)
        models = _named(one.models) if one.models else {}
        return record(Machine(one.ranks, one.machines, one.processors, models), _named(one.program)), None

    return _searched(one.name, orders, recorded, waves=one.waves)


def _named(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)


def _searched(name: str, orders: int, recorded: Callable[[], tuple[Any, Any]], *, waves: bool) -> Searched:
    from bench.streams.device import MachineError
    from bench.streams.search import search

    try:
        program, expected = recorded()
        report = search(program, orders, expected, waves=waves)
    except MachineError as error:
        return Searched(name, orders, failure=str(error))
    except Exception as error:  # of a user's host code, too
        return Searched(name, orders, failure=f"{type(error).__name__}: {error}")
    return Searched(name, orders, report.tasks, report.steps)


def _tell(found: Mapping[str, Searched], seconds: float, path: Path | None) -> int:
    for name, one in found.items():
        told = one.failure.replace("\n", "\n    ") or f"{one.orders} orders of {one.tasks} tasks"
        print(f"{name}: {told}")
    failures = [name for name, one in found.items() if one.failure]
    orders = sum(one.orders for one in found.values())
    told = f"{len(found)} programs in {orders} orders, {seconds:.0f} s"
    print(f"{len(failures)} failures in {told}" if failures else f"all well: {told}")
    write_json(path, {name: asdict(one) for name, one in found.items()})
    return 1 if failures else 0
