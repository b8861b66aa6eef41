"""The table of what each entry may use, per Triton version and architecture: `kernels/budgets.json`.

Compiling is deterministic, so a budget has no tolerance: shared memory to the byte, registers to the next
multiple of 8, in which the hardware hands them out. Another minor version of Triton allocates registers
differently, hence a table of its own for each. Spills are budgeted where no rule forbids them altogether.
What an epilogue waits for may not grow either, and what runs during it may not be lost.
The counts of instructions are no ceilings: any other count is told, by the very version that they come from.
So are other cycles of a step and of an edge, slower or faster (see `cycles`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpkernels.files import parsed, read_text
from tpkernels.gate import cycles
from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.clock.cost import Cost, Stretch
from tpkernels.kernels.footprints import TABLE

REGISTER_UNIT = 8
CEILINGS = ("exposed_waits", "serial_stores")
KEPT = ("products_during_stores", "loads_during_stores")  # what must not be lost


@dataclass(frozen=True, slots=True)
class Budget:
    registers: int
    shared: int
    spills: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)  # absent is zero
    # see `epilogue`; None: not known, and not compared
    exposed_waits: int | None = None
    serial_stores: int | None = None
    products_during_stores: bool | None = None
    loads_during_stores: bool | None = None
    cycles: Mapping[str, Stretch] = field(default_factory=dict)  # of "step" and "edge", where they are known

    @staticmethod
    def of(facts: Facts, cost: Cost | None = None) -> Budget:
        """What the facts need, and no more."""
        registers = -(-facts.registers // REGISTER_UNIT) * REGISTER_UNIT
        epilogue = {name: getattr(facts, name) for name in (*CEILINGS, *KEPT)}
        known = cycles.kept(cost) if cost else {}
        return Budget(registers, facts.shared, facts.spills, facts.instructions, **epilogue, cycles=known)

    def as_json(self) -> dict[str, int | str]:
        """Counts of instructions as one text and cycles as two, so that an entry has a line."""
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.instructions.items()))
        numbers: dict[str, int | str] = {"registers": self.registers, "shared": self.shared}
        epilogue = {name: getattr(self, name) for name in CEILINGS if getattr(self, name) is not None}
        kept = {name: True for name in KEPT if getattr(self, name)}
        spills = {"spills": self.spills} if self.spills else {}
        clocked = {name: cycles.as_text(stretch) for name, stretch in self.cycles.items()}
        return numbers | spills | epilogue | kept | clocked | {"instructions": counts}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Budget:
        """What `as_json` gave; KeyError, TypeError or ValueError for anything else."""
        counts = (text.split() for text in row["instructions"].split(", ") if text)
        clocked = {name: cycles.from_text(row[name]) for name in cycles.NAMES if name in row}
        rest = {name: value for name, value in row.items() if name not in clocked}
        instructions = {name: int(count) for name, count in counts}
        return Budget(**rest | {"instructions": instructions, "cycles": clocked})

    def excesses(self, facts: Facts) -> Iterator[str]:
        """Each number that is over its budget, as "registers 191 > 168"."""
        for name in ("registers", "shared", "spills", *CEILINGS):
            used, ceiling = getattr(facts, name), getattr(self, name)
            if None not in (used, ceiling) and used > ceiling:
                yield f"{name} {used:,} > {ceiling:,}"
        for name in KEPT:
            if getattr(self, name) and getattr(facts, name) is False:
                yield f"{name} no longer"

    def changes(self, facts: Facts) -> Iterator[str]:
        """Each count of instructions that is another, as "HGMMA 8, was 4"."""
        for name in sorted(self.instructions.keys() | facts.instructions.keys()):
            count, was = facts.count(name), self.instructions.get(name, 0)
            if count != was:
                yield f"{name} {count:,}, was {was:,}"


@dataclass(slots=True)
class Budgets:
    """The budgets of one minor version of Triton, with where they come from."""

    provenance: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Budget]] = field(default_factory=dict)  # architecture -> entry -> budget

    def of(self, architecture: str, entry: str) -> Budget | None:
        return self.rows.get(architecture, {}).get(entry)

    def hold(self, architecture: str) -> bool:
        """Whether an architecture's entries are held to rows: where none are listed, all are."""
        listed = self.provenance.get("architectures")
        return listed is None or architecture in listed.split()

    def keys(self) -> set[tuple[str, str]]:
        """(architecture, entry) of every row."""
        return {(architecture, name) for architecture, entries in self.rows.items() for name in entries}


def minor_version(triton_version: str) -> str:
    """ "3.7" of "3.7.1"."""
    return ".".join(triton_version.split(".")[:2])


def read(path: Path = TABLE) -> dict[str, Budgets]:
    """The whole table: minor version of Triton -> budgets. ValueError if it is damaged."""
    if not path.exists():
        return {}
    try:
        return _parsed(parsed(read_text(path)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no table of budgets ({error!r}): restore it") from error


def _parsed(table: Any) -> dict[str, Budgets]:
    return {
        minor: Budgets(
            part["provenance"],
            {
                architecture: {name: Budget.from_json(row) for name, row in entries.items()}
                for architecture, entries in part["rows"].items()
            },
        )
        for minor, part in table.items()
    }


def updated(
    old: Budgets | None,
    new: Mapping[tuple[str, str], Budget],
    current: Collection[tuple[str, str]],
    provenance: dict[str, str],
) -> Budgets:
    """The old budgets with the new in place of theirs, without rows that are no longer current.

    A table begun for some architectures lists them: only their rows may not be lost.

    new, current: by (architecture, name of the entry)
    """
    flat = {
        (architecture, name): budget
        for architecture, entries in (old.rows if old else {}).items()
        for name, budget in entries.items()
        if (architecture, name) in current
    }
    flat |= new
    rows: dict[str, dict[str, Budget]] = {}
    for (architecture, name), budget in flat.items():
        rows.setdefault(architecture, {})[name] = budget
    every, begun = {gpu for gpu, _ in current}, {gpu for gpu, _ in new}
    held = {gpu for gpu in every if gpu in begun or (old and old.hold(gpu))}
    listed = {} if held == every else {"architectures": " ".join(sorted(held))}
    return Budgets(provenance | listed, rows)


def write(table: Mapping[str, Budgets], path: Path = TABLE) -> None:
    """In a fixed order and one line an entry, so that a change of the table reads well in review."""
    plain = {
        minor: {
            "provenance": budgets.provenance,
            "rows": {
                architecture: {name: budget.as_json() for name, budget in entries.items()}
                for architecture, entries in budgets.rows.items()
            },
        }
        for minor, budgets in table.items()
    }
    text = json.dumps(plain, indent=1, sort_keys=True)
    innermost = re.compile(r"\{[^{}]*\}")
    path.write_text(innermost.sub(lambda found: " ".join(found[0].split()), text) + "\n", encoding="utf-8")
