"""What `check` prints, and what it writes with --json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpkernels.gate.compile_gate import Checked, Compiled, UsageError
from tpkernels.gate.computing import Computed

# shown if present; the rest of the mix is in the JSON
SHOWN = (
    *("HGMMA", "UTCHMMA", "HMMA", "QGMMA", "UTCQMMA", "QMMA", "FFMA", "FFMA2", "v_mfma"),
    *("UTMALDG", "UTMASTG", "UTMAREDG", "LDGSTS", "STL", "LDL"),
)
HEADINGS = "regs   shared  blocks  spills  ahead  loop  instructions"


IF_MEANT = "if these changes are meant, --update makes them the budgets"


def tell(
    versions: Mapping[str, str],
    checked: Checked,
    computed: Sequence[Computed],
    seconds: float,
    path: Path | None,
) -> int:
    """Print all, and write it into `path`; returns how many failures there are.

    A change against a budget may be meant, and its cure is named; not beside a fault, which nobody means.
    """
    compiled, notes = checked.compiled, checked.notes
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    _print_compiled(compiled)
    _print_computed(computed)
    print()
    for note in notes:
        print(f"note: {note}")
    failures = _failure_lines(checked, computed)
    for failure in failures:
        print(failure)
    if len(failures) == sum(len(one.changes) for one in compiled) > 0:
        print(IF_MEANT)
    told = f"{len(compiled)} compilations and {len(computed)} computations in {seconds:.0f} s"
    print(f"{len(failures)} failures in {told}" if failures else f"all well: {told}")
    if path is not None:
        report = _as_json(versions, checked, computed)
        try:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write the report: {error}") from error
    return len(failures)


def _print_compiled(compiled: Sequence[Compiled]) -> None:
    """A table an architecture."""
    name_width = max((len(one.job.entry.name) for one in compiled), default=0)
    architecture = ""
    for one in compiled:
        if one.job.architecture != architecture:
            architecture = one.job.architecture
            print(f"\n{architecture:<{name_width + 5}}  {HEADINGS}")
        mark = "FAIL" if one.failures else "ok"
        print(f"{mark:<5}{one.job.entry.name:<{name_width}}  {_numbers(one)}".rstrip())


def _print_computed(computed: Sequence[Computed]) -> None:
    """A line a launcher: how many cases, and the worst error as a part of the bound."""
    if not computed:
        return
    print("\ninterpreter against float64, largest error as a part of what is allowed")
    launchers: dict[str, list[Computed]] = {}
    for one in computed:
        launchers.setdefault(one.case.split("/")[0], []).append(one)
    for launcher, cases in launchers.items():
        mark = "FAIL" if any(one.failure for one in cases) else "ok"
        worst = max((one.error for one in cases if one.error == one.error), default=float("nan"))
        print(f"{mark:<5}{launcher:<20}  {len(cases):>3} cases  {worst:.2f}")


def _failure_lines(checked: Checked, computed: Sequence[Computed]) -> list[str]:
    """Each finding in a line that can be read alone: faults, wrong results, then changes against budgets."""
    entries = [(f"{_at(made.job.entry.place)}entry {made.job}", made) for made in checked.compiled]
    wrong = [f"{_at(one.place)}numerics of {one.case}: {one.failure}" for one in computed if one.failure]
    return [
        *checked.absent,
        *(f"{entry}: {fault}" for entry, made in entries for fault in made.faults),
        *wrong,
        *(f"{entry}: {change}" for entry, made in entries for change in made.changes),
    ]


def _at(place: str) -> str:
    return f"{place}: " if place else ""


def _as_json(versions: Mapping[str, str], checked: Checked, computed: Sequence[Computed]) -> dict[str, Any]:
    return {
        "versions": dict(versions),
        "failures": _failure_lines(checked, computed),
        "notes": list(checked.notes),
        "compiled": [
            {
                "entry": one.job.entry.name,
                "architecture": one.job.architecture,
                "failures": list(one.failures),
                "facts": one.facts.as_json() if one.facts else None,
            }
            for one in checked.compiled
        ],
        "numerics": [
            # JSON has no NaN: null says that there is no number
            {"case": one.case, "error": one.error if one.error == one.error else None, "failure": one.failure}
            for one in computed
        ],
    }


def _numbers(one: Compiled) -> str:
    facts = one.facts
    if facts is None:
        return "does not compile"
    mix = " ".join(f"{name} {facts.count(name)}" for name in SHOWN if facts.count(name))
    blocks = "-" if facts.blocks is None else facts.blocks
    taken = f"{facts.registers:>4}  {facts.shared:>7,}  {blocks:>6}  {facts.spills:>6}"
    ahead = facts.pipeline[0] if facts.pipeline else "-"
    loop = facts.loop.get("all", 0) if facts.loops else "-"
    return f"{taken}  {ahead:>5}  {loop:>4}  {mix}"
