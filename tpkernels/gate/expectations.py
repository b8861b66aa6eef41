"""Budgets: a table of what each entry compiles to, per minor version of Triton and architecture.

Compiling is deterministic, so a budget has no tolerance: a row holds the facts, and with the very Triton that
they are of each difference is a failure, told by its cause (see `causes`). Another patch of Triton orders
instructions differently: then only what got worse is, and more registers or shared memory. Another minor
version has a table of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpkernels.files import parsed, read_text
from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.causes import Change, at_least, changes

NUMBERS = (
    *("registers", "shared", "stack", "spills", "threads", "blocks", "in_flight"),
    *("loops", "load_bytes", "load_waits", "tile_loops"),
)
COUNTS = ("instructions", "loop", "rest")
CEILINGS = ("registers", "shared")  # which another patch of Triton may not pass either


def kept(facts: Facts) -> Facts:
    """What a row holds: all that `causes` compare."""
    return from_row(as_row(facts))


def as_row(facts: Facts) -> dict[str, int | str]:
    """Numbers that are not 0, and counts as one text, so that an entry has a line."""
    numbers = {name: number for name in NUMBERS if (number := getattr(facts, name))}
    texts = {
        name: ", ".join(f"{kind} {count}" for kind, count in sorted(getattr(facts, name).items()))
        for name in COUNTS
    }
    pipeline = {"pipeline": " ".join(map(str, facts.pipeline))} if facts.pipeline else {}
    return numbers | pipeline | texts


def from_row(row: Mapping[str, Any]) -> Facts:
    """What `as_row` kept; KeyError, TypeError or ValueError for anything else."""
    if unknown := row.keys() - {*NUMBERS, *COUNTS, "pipeline"}:
        raise KeyError(*unknown)
    counts = {
        name: {
            kind: int(count) for kind, count in (one.rsplit(" ", 1) for one in row[name].split(", ") if one)
        }
        for name in COUNTS
    }
    nothing: dict[str, Any] = dict.fromkeys(NUMBERS, 0) | {"blocks": None, "instructions": {}, "seconds": 0.0}
    unheld = dict.fromkeys(("narrow_offsets", "unordered_reads", "unordered_flags"), ())
    pipeline = tuple(map(int, row.get("pipeline", "").split()))
    numbers = {name: row[name] + 0 for name in NUMBERS if name in row}
    return Facts(**nothing | unheld | {"aligned": frozenset(), "pipeline": pipeline} | numbers | counts)


def failures(budget: Facts, facts: Facts, architecture: str, same_triton: bool) -> list[Change]:
    """The changes that a budget does not excuse; what got worse says more than the rest."""
    found = changes(budget, kept(facts), architecture)
    worse = at_least(found, "worse")
    if same_triton:
        return worse or found
    return [one for one in found if one in worse or one.what in CEILINGS]


@dataclass(slots=True)
class Budgets:
    """The budgets of one minor version of Triton, with where they come from."""

    provenance: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Facts]] = field(default_factory=dict)  # architecture -> entry -> as `kept`

    def of(self, architecture: str, entry: str) -> Facts | None:
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


def read(path: Path) -> dict[str, Budgets]:
    """The whole table: minor version of Triton -> budgets. ValueError if it is damaged."""
    if not path.exists():
        return {}
    try:
        return _parsed(parsed(read_text(path)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        told = f"{path} is no table of budgets of this version ({error!r})"
        raise ValueError(f"{told}: restore it, or remove it and write it anew with --update") from error


def _parsed(table: Any) -> dict[str, Budgets]:
    return {
        minor: Budgets(
            part["provenance"],
            {
                architecture: {name: from_row(row) for name, row in entries.items()}
                for architecture, entries in part["rows"].items()
            },
        )
        for minor, part in table.items()
    }


def updated(
    old: Budgets | None,
    new: Mapping[tuple[str, str], Facts],
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
    rows: dict[str, dict[str, Facts]] = {}
    for (architecture, name), budget in flat.items():
        rows.setdefault(architecture, {})[name] = budget
    every, begun = {gpu for gpu, _ in current}, {gpu for gpu, _ in new}
    held = {gpu for gpu in every if gpu in begun or (old and old.hold(gpu))}
    listed = {} if held == every else {"architectures": " ".join(sorted(held))}
    return Budgets(provenance | listed, rows)


def write(table: Mapping[str, Budgets], path: Path) -> None:
    """In a fixed order and one line an entry, so that a change of the table reads well in review."""
    plain = {
        minor: {
            "provenance": budgets.provenance,
            "rows": {
                architecture: {name: as_row(facts) for name, facts in entries.items()}
                for architecture, entries in budgets.rows.items()
            },
        }
        for minor, budgets in table.items()
    }
    text = json.dumps(plain, indent=1, sort_keys=True)
    innermost = re.compile(r"\{[^{}]*\}")
    path.write_text(innermost.sub(lambda found: " ".join(found[0].split()), text) + "\n", encoding="utf-8")
