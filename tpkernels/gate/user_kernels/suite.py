"""What `check --config` does: the kernels of a config as a suite, and what computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from tpkernels.gate.ahead_of_time import Entry, Facts
from tpkernels.gate.catalog import has_parts
from tpkernels.gate.compile_gate import Suite
from tpkernels.gate.numerics import Computed
from tpkernels.gate.user_kernels import children, config
from tpkernels.gate.user_kernels.config import Config
from tpkernels.gate.user_kernels.entries import entry_of, inspect
from tpkernels.gate.user_kernels.record import ConfigError
from tpkernels.gate.user_kernels.rules import violations
from tpkernels.gate.user_kernels.workload import OwnLaunching


class Compute(Protocol):
    """As `gate.numerics.check`."""

    def __call__(self, only: str, report: Callable[[str], None]) -> list[Computed]: ...


def read(path: Path) -> tuple[Suite, Compute]:
    """ConfigError names file and key of what is wrong, in the config or in what it names."""
    chosen = config.read(path)
    entries = {entry.name: entry for entry in _entries(chosen)}
    architectures = {name: entry.architectures for name, entry in entries.items()}
    kernels = {own.name: own for own in chosen.kernels}

    def rules(entry: Entry, architecture: str, facts: Facts) -> Iterable[str]:
        return violations(kernels[entry.name].rules, architecture, facts)

    def launching(entry: Entry) -> OwnLaunching | None:
        own = kernels[entry.name]
        return OwnLaunching(own, tuple(entry.arguments)) if own.sizes else None

    suite = Suite(chosen.path.name, architectures, entries.__getitem__, chosen.budgets, rules, launching)
    return suite, partial(_compute, chosen)


def _entries(chosen: Config) -> Iterable[Entry]:
    for own, kernel in inspect(chosen.kernels, chosen.folder):
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
