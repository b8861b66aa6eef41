"""The table of compiled kernels in `docs/measured-kernels.md`, from reports of `check --json`.

python -m bench.kernel_table 2026-11-21 check-3.6.json check-3.7.json > docs/measured-kernels.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import waves

HEADER = """# Kernels as compiled

For those who choose or change kernels: what the compiler made of every catalog entry, read off compiled
code without a GPU.

Columns: registers a thread, shared memory a block (bytes), spill instructions, blocks that an SM holds,
what an epilogue waits for, what can run while it stores, and instructions, with the registers of each role
of warps. sm_90 also has cycles of a step and of an edge, by [a model](clock.md) of one SM. Nothing here is
a measured time. Compiled {date} with Triton {versions}, by `python -m tpkernels check --json FILE` and
`python -m bench.kernel_table`. Two numbers in a column are of these versions in this order; the last two
columns are of the last version. [The check](check.md#epilogues) says what it asserts of a row, and what the
columns count.
"""
COLUMNS = {  # fact -> what the page calls it
    "registers": "registers",
    "shared": "shared",
    "spills": "spills",
    "blocks": "blocks an SM",
    "exposed_waits": "exposed waits",
    "serial_stores": "serial stores",
}
CYCLES = {"step": "cycles of a step", "edge": "of an edge"}  # where anything was clocked
SHOWN = (
    "HGMMA",
    "UTCHMMA",
    "HMMA",
    "QGMMA",
    "UTCQMMA",
    "QMMA",
    "v_mfma",
    "FFMA",
    "FFMA2",
    "UTMALDG",
    "UTMASTG",
    "UTMAREDG",
    "LDGSTS",
    "MUFU",
)


def table(date: str, reports: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of the page; a row stands for one entry on one architecture in each report."""
    versions = " and ".join(report["versions"]["triton"] for report in reports)
    yield HEADER.format(date=date, versions=versions)
    rows: dict[str, dict[str, list[dict[str, Any] | None]]] = {}
    for report in reports:
        for one in report["compiled"]:
            facts = one["facts"] and one["facts"] | _cycles(one.get("cost") or {})
            rows.setdefault(one["architecture"], {}).setdefault(one["entry"], []).append(facts)
    for architecture, entries in rows.items():
        yield f"## {architecture}\n"
        is_clocked = any(one and "edge" in one for row in entries.values() for one in row)
        columns = COLUMNS | CYCLES if is_clocked else COLUMNS
        yield f"| entry | {' | '.join(columns.values())} | beside stores | instructions |"
        yield "|---" * (len(columns) + 3) + "|"
        for name, facts in entries.items():
            numbers = " | ".join(_both(facts, key) for key in columns)
            yield f"| {name} | {numbers} | {_beside(facts[-1])} | {_mix(facts[-1])} |"
        yield ""
    yield from waves.table()


def _cycles(cost: dict[str, Any]) -> dict[str, int]:
    return {name: round(cost[name]["cycles"]) for name in CYCLES if cost.get(name)}


def _both(facts: list[dict[str, Any] | None], key: str) -> str:
    """One number where the versions agree, else one of each."""
    numbers = ["-" if one is None or one.get(key) is None else f"{one[key]:,}" for one in facts]
    return numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers)


def _beside(facts: dict[str, Any] | None) -> str:
    """What can run while results are stored."""
    return ", ".join(what for what in ("products", "loads") if facts and facts.get(f"{what}_during_stores"))


def _mix(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "does not compile"
    roles = [f"roles {'/'.join(map(str, facts['role_registers']))}"] if facts.get("role_registers") else []
    counts = [f"{name} {facts['instructions'][name]}" for name in SHOWN if name in facts["instructions"]]
    return ", ".join(counts + roles)


if __name__ == "__main__":
    day, *paths = sys.argv[1:]
    print("\n".join(table(day, [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])))
