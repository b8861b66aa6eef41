"""The table of compiled kernels in `docs/measured-kernels.md`, from reports of `check --json`.

python -m bench.kernel_table 2026-11-21 check-3.6.json check-3.7.json > docs/measured-kernels.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = """# Kernels as compiled

Registers a thread, shared memory a block (bytes), spill instructions and instruction mix of every catalog
entry, read off compiled code without a GPU. Nothing here is a time. Measured {date} with Triton {versions},
by `python -m tpkernels check --json FILE` and `python -m bench.kernel_table`; two numbers in a column are of
these versions in this order, the mix is of the last. What is asserted of a row: [the check](check.md).
"""
SHOWN = (
    "HGMMA",
    "UTCHMMA",
    "HMMA",
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
            rows.setdefault(one["architecture"], {}).setdefault(one["entry"], []).append(one["facts"])
    for architecture, entries in rows.items():
        yield f"## {architecture}\n"
        yield "| entry | registers | shared | spills | instructions |"
        yield "|---|---|---|---|---|"
        for name, facts in entries.items():
            numbers = [_both(facts, key) for key in ("registers", "shared", "spills")]
            yield f"| {name} | {' | '.join(numbers)} | {_mix(facts[-1])} |"
        yield ""


def _both(facts: list[dict[str, Any] | None], key: str) -> str:
    """One number where the versions agree, else one of each."""
    numbers = ["-" if one is None else f"{one[key]:,}" for one in facts]
    return numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers)


def _mix(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "does not compile"
    return ", ".join(
        f"{name} {facts['instructions'][name]}" for name in SHOWN if name in facts["instructions"]
    )


if __name__ == "__main__":
    day, *paths = sys.argv[1:]
    print("\n".join(table(day, [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])))
