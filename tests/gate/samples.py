"""An entry by its name, and what might be found of one."""

from tpkernels.gate.ahead_of_time import Entry, Facts
from tpkernels.gate.clock.cost import Cost, Stretch
from tpkernels.registered.entries import entry_specs


def entry_of(name: str) -> Entry:
    return entry_specs()[name].entry()


FACTS = Facts(
    registers=163,
    stack=0,
    spills=0,
    shared=1000,
    in_flight=1,
    instructions={"HGMMA": 4},
    aligned=frozenset({"x", "w"}),
    narrow_offsets=("%1",),
    unordered_reads=(),
    unordered_flags=(),
    seconds=1.0,
)
COST = Cost(
    step=Stretch(1040.4, {"copies": 310.0, "products": 90.0, "barrier": 3.0}, 0),
    edge=Stretch(5950.0, {"stores": 2400.0, "scoreboard: LDG": 700.0}, 0),
    ideal=1024.0,
    start=1500.0,
    resident=1,
    bytes=131_072,
    guessed=0,
)
