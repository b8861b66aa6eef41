"""One machine instruction of sm_90 with the control fields that ptxas wrote into it.

An instruction has 128 bits; cuobjdump prints the low 64, then the high 64. Of the whole, counted from 0:

    105-108 cycles to stall | 109 yield | 110-112 scoreboard of the result (7: none)
    113-115 scoreboard of the operands (7: none) | 116-121 mask of scoreboards to wait for
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOW = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_HIGH = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_TEXT = re.compile(r"^(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*(.*)$")
BYTES = 16  # of an instruction


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    guard: str  # "P0", "!UP1"; "": none
    opcode: str  # "HGMMA"
    modifiers: tuple[str, ...]  # ("64x256x16", "F32", "BF16")
    operands: tuple[str, ...]  # ("R24", "gdesc[UR8]", "R24", "gsb0")
    stall: int  # cycles until the next instruction of the warp may issue
    yields: bool  # the scheduler had better turn to another warp
    writes: int | None  # the scoreboard released when the result is there
    reads: int | None  # the scoreboard released when the operands are read
    waits: tuple[int, ...]  # scoreboards that must be released before it issues

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        name = ".".join((self.opcode, *self.modifiers))
        return f"{self.address:#06x} {guard}{name} {', '.join(self.operands)}".rstrip()


def parse(listing: str) -> tuple[Instruction, ...]:
    """The instructions of a `cuobjdump -sass` listing of one kernel."""
    found: list[Instruction] = []
    pending: tuple[int, str] | None = None
    for line in listing.splitlines():
        if low := _LOW.match(line):
            pending = int(low[1], 16), low[2]
        elif (high := _HIGH.match(line)) and pending:
            found.append(_instruction(*pending, int(high[1], 16)))
            pending = None
    return tuple(found)


def _instruction(address: int, text: str, high: int) -> Instruction:
    match = _TEXT.match(text)
    assert match, f"not an instruction: {text!r}"
    guard, opcode, modifiers, operands = match.groups()
    control = high >> 41  # bit 105 of 128
    result, sources = control >> 5 & 7, control >> 8 & 7
    return Instruction(
        address=address,
        guard="" if guard is None or guard in ("PT", "UPT") else guard,
        opcode=opcode,
        modifiers=tuple(part for part in modifiers.split(".") if part),
        operands=_split(operands),
        stall=control & 15,
        yields=not control >> 4 & 1,  # 0 says yes
        writes=None if result == 7 else result,
        reads=None if sources == 7 else sources,
        waits=tuple(scoreboard for scoreboard in range(6) if control >> 11 >> scoreboard & 1),
    )


def _split(operands: str) -> tuple[str, ...]:
    """At the commas outside brackets, without the hint that an operand is used again."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(operands):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            parts.append(operands[start:at])
            start = at + 1
    if operands:
        parts.append(operands[start:])
    return tuple(part.strip().replace(".reuse", "") for part in parts)
