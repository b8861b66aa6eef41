"""An entry by its name, and what might be found of one."""

from tpkernels.gate.ahead_of_time import Entry, Facts
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
