"""What `check` prints, and what it writes with --json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.check_compile import Compiled
from tpkernels.gate.check_numerics import Computed

# shown if present; the rest of the mix is in the JSON
SHOWN = (
    "HGMMA",
    "UTCHMMA",
    "HMMA",
    "FFMA",
    "FFMA2",
    "v_mfma",
    "UTMALDG",
    "UTMASTG",
    "UTMAREDG",
    "LDGSTS",
    "STL",
    "LDL",
)


def print_compiled(compiled: Sequence[Compiled]) -> None:
    """A table an architecture."""
    name_width = max((len(one.job.entry.name) for one in compiled), default=0)
    architecture = ""
    for one in compiled:
        if one.job.architecture != architecture:
            architecture = one.job.architecture
            print(f"\n{architecture:<{name_width + 5}}  regs   shared  spills  instructions")
        mark = "FAIL" if one.failures else "ok"
        print(f"{mark:<5}{one.job.entry.name:<{name_width}}  {_numbers(one.facts)}".rstrip())


def print_computed(computed: Sequence[Computed]) -> None:
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


def failure_lines(compiled: Sequence[Compiled], computed: Sequence[Computed]) -> list[str]:
    """Each finding in a line that can be read alone."""
    lines = [f"entry {one.job}: {failure}" for one in compiled for failure in one.failures]
    return lines + [f"numerics of {one.case}: {one.failure}" for one in computed if one.failure]


def as_json(
    versions: dict[str, str], compiled: Sequence[Compiled], computed: Sequence[Computed], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "versions": versions,
        "failures": failure_lines(compiled, computed),
        "notes": list(notes),
        "compiled": [
            {
                "entry": one.job.entry.name,
                "architecture": one.job.architecture,
                "failures": list(one.failures),
                "facts": one.facts.as_json() if one.facts else None,
            }
            for one in compiled
        ],
        "numerics": [
            # JSON has no NaN: null says that there is no number
            {"case": one.case, "error": one.error if one.error == one.error else None, "failure": one.failure}
            for one in computed
        ],
    }


def _numbers(facts: Facts | None) -> str:
    if facts is None:
        return "does not compile"
    mix = " ".join(f"{name} {facts.count(name)}" for name in SHOWN if facts.count(name))
    return f"{facts.registers:>4}  {facts.shared:>7,}  {facts.spills:>6}  {mix}"
