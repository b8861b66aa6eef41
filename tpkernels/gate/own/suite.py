"""What `check --config` does: the kernels of a config as a suite, and what computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tpkernels.gate.ahead_of_time import Entry, Facts
from tpkernels.gate.catalog import has_parts
from tpkernels.gate.clock.launch import Launch
from tpkernels.gate.compile_gate import Suite
from tpkernels.gate.numerics import Computed
from tpkernels.gate.own import config, numerics
from tpkernels.gate.own.config import Config
from tpkernels.gate.own.entries import entry_of, inspect
from tpkernels.gate.own.record import ConfigError
from tpkernels.gate.own.rules import violations

Compute = Callable[[str, Callable[[str], None]], list[Computed]]  # as `gate.numerics.check`


def read(path: Path) -> tuple[Suite, Compute]:
    """ConfigError names file and key of what is wrong, in the config or in what it names."""
    chosen = config.read(path)
    entries = tuple(_entries(chosen))
    rules = {own.name: own.rules for own in chosen.kernels}

    def broken(entry: Entry, architecture: str, facts: Facts) -> Iterable[str]:
        return violations(rules[entry.name], architecture, facts)

    return Suite(chosen.path.name, entries, chosen.budgets, broken, _launch), partial(_compute, chosen)


def _entries(chosen: Config) -> Iterable[Entry]:
    for own, kernel in inspect(chosen.kernels, chosen.folder):
        try:
            if isinstance(kernel, ConfigError):
                raise kernel
            yield entry_of(own, kernel, chosen.folder)
        except ConfigError as error:
            raise chosen.mistake(own, error) from error


def _launch(entry: Entry) -> Launch | None:
    return None


def _compute(chosen: Config, only: str, report: Callable[[str], None]) -> list[Computed]:
    """Each case that `only` names, see `has_parts`. Nothing is remembered: what an oracle imports is not known."""
    found = []
    kernels = [own for own in chosen.kernels if has_parts(own.name, only)]
    for own, case, answer in numerics.compute(kernels, chosen.folder):
        if isinstance(answer, ConfigError):
            raise chosen.mistake(own, answer)
        error = float("nan") if answer["error"] is None else answer["error"]
        found.append(Computed(case, error, answer["failure"]))
        report(case)
    return found
