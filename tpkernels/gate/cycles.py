"""What of a kernel's cycles the table of budgets keeps, and what is said where they have changed.

The clock gives the same cycles for the same machine code; what is tolerated is that a few instructions are in
another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tpkernels.gate.clock.cost import Cost, Stretch

NAMES = ("step", "edge")  # of stretches
TOLERANCE = 0.03
LEAST_CHANGE = {"step": 1.0, "edge": 16.0}  # cycles: where other warps hide it, an edge is next to nothing
LEAST = 0.01  # of a stretch: causes of less are not kept


def as_text(stretch: Stretch) -> str:
    """ "5950 cycles, 4 serial loads; stores 2410; barrier 800": one text, so that an entry has a line."""
    serial = f", {stretch.serial_loads} serial loads" if stretch.serial_loads else ""
    least = LEAST * stretch.cycles
    large = [f"{cause} {spent:.0f}" for cause, spent in stretch.waits.items() if spent >= least]
    return "; ".join([f"{round(stretch.cycles)} cycles{serial}", *large])


def from_text(text: str) -> Stretch:
    """What `as_text` gave; ValueError for anything else."""
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


def kept(cost: Cost) -> dict[str, Stretch]:
    """What the table keeps of a cost: rounded, and without small causes."""
    return {name: from_text(as_text(stretch)) for name, stretch in stretches(cost).items()}


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
