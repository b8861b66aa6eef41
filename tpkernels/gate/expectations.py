"""Budgets: a table of what each entry may use, per minor version of Triton and architecture.

Compiling is deterministic, so a budget has no tolerance: shared memory to the byte, registers to the next
multiple of 8, in which the hardware hands them out. Another minor version of Triton allocates registers
differently, hence a table of its own for each. Spills are budgeted where no rule forbids them altogether.
The counts of instructions are no ceilings: any other count is told, by the very version that they come from.
So are other cycles of a step and of an edge, slower or faster. The clock gives the same cycles for the same
machine code; what is tolerated is that a few instructions are in another order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.files import parsed, read_text
from tpkernels.gate.ahead_of_time import Facts

if TYPE_CHECKING:
    from tpkernels.gate.clock.cost import Cost, Stretch

NAMES = ("step", "edge")  # of stretches
TOLERANCE = 0.03
LEAST_CHANGE = {"step": 1.0, "edge": 16.0}  # cycles: where other warps hide it, an edge is next to nothing
LEAST = 0.01  # of a stretch: causes of less are not kept


def as_text(stretch: Stretch) -> str:
    """ "5950 cycles, 4 serial loads; stores 2410; barrier 800": one text, so that an entry has a line."""
    serial = f", {stretch.serial_loads} serial loads" if stretch.serial_loads else ""
    cycles = round(stretch.cycles)
    large = [
        f"{cause} {spent:.0f}" for cause, spent in stretch.waits.items() if round(spent) >= LEAST * cycles
    ]
    return "; ".join([f"{cycles} cycles{serial}", *large])


def from_text(text: str) -> Stretch:
    """Return what `as_text` was given, rounded; ValueError for anything else."""
    from tpkernels.gate.clock.cost import Stretch  # imports Triton, which those who read rules may do without

    head, *large = text.split("; ")
    cycles, _, serial = head.partition(" cycles")
    waits = dict(one.rsplit(" ", 1) for one in large)
    loads = serial.removeprefix(", ").removesuffix(" serial loads")
    return Stretch(float(cycles), {cause: float(spent) for cause, spent in waits.items()}, int(loads or 0))


def slower(before: Mapping[str, Stretch], cost: Cost) -> Iterator[str]:
    """Each stretch that takes longer, and why: "step 1,040 -> 1,460 cycles: waits for copies"."""
    for name, was, now in _pairs(before, cost):
        if now.cycles - was.cycles > max(TOLERANCE * was.cycles, LEAST_CHANGE[name]):
            yield f"{_change(name, was, now)}: {_cause(was, now)}"


def faster(before: Mapping[str, Stretch], cost: Cost) -> Iterator[str]:
    """Each stretch that takes less, as "step 1,040 -> 900 cycles"."""
    for name, was, now in _pairs(before, cost):
        if was.cycles - now.cycles > max(TOLERANCE * was.cycles, LEAST_CHANGE[name]):
            yield _change(name, was, now)


def cost_as_texts(cost: Cost) -> dict[str, str]:
    """A text for each stretch, and one for the rest: rounded, and without small causes."""
    rest = f"ideal {cost.ideal:g}, start {cost.start:.0f}, resident {cost.resident}, bytes {cost.bytes}"
    ends = {"launch": f"{rest}, guessed {cost.guessed}, program {cost.program or '-'}"}
    return {name: as_text(stretch) for name, stretch in stretches(cost).items()} | ends


def cost_from_texts(texts: Mapping[str, Any]) -> Cost:
    """Return what `cost_as_texts` was given, rounded; KeyError or ValueError for anything else."""
    from tpkernels.gate.clock.cost import Cost

    step = from_text(texts["step"]) if "step" in texts else None
    rest = dict(one.split() for one in texts["launch"].split(", "))
    return Cost(
        step,
        from_text(texts["edge"]),
        ideal=float(rest["ideal"]),
        start=float(rest["start"]),
        resident=int(rest["resident"]),
        bytes=int(rest["bytes"]),
        guessed=int(rest["guessed"]),
        program=rest["program"].strip("-"),
    )


def kept(cost: Cost) -> Cost:
    """What the table keeps of a cost."""
    return cost_from_texts(cost_as_texts(cost))


def stretches(cost: Cost) -> dict[str, Stretch]:
    """By the names that failures call them."""
    return ({} if cost.step is None else {"step": cost.step}) | {"edge": cost.edge}


def _pairs(before: Mapping[str, Stretch], cost: Cost) -> Iterator[tuple[str, Stretch, Stretch]]:
    after = stretches(cost)
    for name, was in before.items():
        if name in after:  # else the kernel has no main loop any more, which its instructions tell
            yield name, was, after[name]


def _change(name: str, was: Stretch, now: Stretch) -> str:
    return f"{name} {was.cycles:,.0f} -> {now.cycles:,.0f} cycles"


def _cause(was: Stretch, now: Stretch) -> str:
    """Why more cycles are spent than before."""
    if now.serial_loads > max(was.serial_loads, 1):
        return f"{now.serial_loads} loads awaited one after the other"
    grown = {cause: spent - was.waits.get(cause, 0.0) for cause, spent in now.waits.items()}
    most = max(grown, key=grown.__getitem__, default="")
    if most and grown[most] > (now.cycles - was.cycles) / 4:
        return f"waits for {most.removeprefix('scoreboard: ')}"
    return "more instructions"


REGISTER_UNIT = 8


@dataclass(frozen=True, slots=True)
class Budget:
    registers: int
    shared: int
    spills: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)  # absent is zero
    cost: Cost | None = None  # as `kept` rounds it; None: not clocked

    @staticmethod
    def of(facts: Facts, cost: Cost | None = None) -> Budget:
        """What the facts need, and no more."""
        registers = -(-facts.registers // REGISTER_UNIT) * REGISTER_UNIT
        known = kept(cost) if cost else None
        return Budget(registers, facts.shared, facts.spills, facts.instructions, known)

    def as_json(self) -> dict[str, int | str]:
        """Counts of instructions as one text and the cost as three, so that an entry has a line."""
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.instructions.items()))
        numbers: dict[str, int | str] = {"registers": self.registers, "shared": self.shared}
        spills = {"spills": self.spills} if self.spills else {}
        clocked = cost_as_texts(self.cost) if self.cost else {}
        return numbers | spills | clocked | {"instructions": counts}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Budget:
        """What `as_json` gave; KeyError, TypeError or ValueError for anything else."""
        counts = (text.split() for text in row["instructions"].split(", ") if text)
        instructions = {name: int(count) for name, count in counts}
        cost = cost_from_texts(row) if "edge" in row else None
        return Budget(row["registers"], row["shared"], row.get("spills", 0), instructions, cost)

    @property
    def cycles(self) -> Mapping[str, Stretch]:
        """Of "step" and "edge", where they are known."""
        return stretches(self.cost) if self.cost else {}

    def excesses(self, facts: Facts) -> Iterator[str]:
        """Each number that is over its budget, as "registers 191 > 168"."""
        for name in ("registers", "shared", "spills"):
            used, ceiling = getattr(facts, name), getattr(self, name)
            if used > ceiling:
                yield f"{name} {used:,} > {ceiling:,}"

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


def read(path: Path) -> dict[str, Budgets]:
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


def write(table: Mapping[str, Budgets], path: Path) -> None:
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
