"""Instructions on single bits and bytes of a register."""

from __future__ import annotations

from tpkernels.gate.clock.instructions import Instruction
from tpkernels.gate.clock.lanes import by_lane
from tpkernels.gate.clock.operands import (
    Meaning,
    UnknownOperand,
    assign,
    assign_all,
    destination,
    results,
    source,
)
from tpkernels.gate.clock.values import WORD

SIGN = 0x80000000


def permute(one: Instruction) -> Meaning:
    """PRMT d, a, selector, b: each nibble of the selector chooses a byte of the pair b, a."""

    def compute(a: int, selector: int, b: int) -> int:
        whole, result = b << 32 | a, 0
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = whole >> 8 * (nibble & 7) & 0xFF
            if nibble & 8:
                byte = 0xFF * (byte >> 7)
            result |= byte << 8 * place
        return result

    if len(one.modifiers):  # F4E, B4E, RC8, ...: nothing compiles to these here
        raise UnknownOperand(str(one))
    return assign(destination(one.operands[0]), tuple(map(source, one.operands[1:4])), by_lane(compute))


def extend(one: Instruction) -> Meaning:
    """SGXT d, a, width: the low bits, with their sign; .U32: without."""
    unsigned = "U32" in one.modifiers

    def compute(a: int, width: int) -> int:
        if width >= 32:
            return a
        low = a & (1 << width) - 1
        return low if unsigned or not width or not low >> width - 1 else low - (1 << width) & WORD

    return assign(destination(one.operands[0]), tuple(map(source, one.operands[1:3])), by_lane(compute))


def bit_mask(one: Instruction) -> Meaning:
    """BMSK d, position, width."""
    return assign(
        destination(one.operands[0]),
        tuple(map(source, one.operands[1:3])),
        by_lane(lambda at, width: ((1 << min(width, 32)) - 1 << min(at, 32)) & WORD),
    )


def find_leading_one(one: Instruction) -> Meaning:
    """FLO d, a: its place, all ones for 0; .SH: counted from above."""
    signs, from_above = "U32" not in one.modifiers, "SH" in one.modifiers
    to, carries, rest = results(one)

    def compute(a: int) -> int:
        if signs and a & SIGN:
            a ^= WORD
        place = a.bit_length() - 1
        return WORD if place < 0 else 31 - place if from_above else place

    if carries:
        found = by_lane(compute)
        return assign_all((to, *carries), (source(rest[0]),), lambda a: ((r := found(a)), r != WORD))
    return assign(to, (source(rest[0]),), by_lane(compute))


def count_ones(one: Instruction) -> Meaning:
    return assign(destination(one.operands[0]), (source(one.operands[1]),), by_lane(int.bit_count))


def reverse_bits(one: Instruction) -> Meaning:
    return assign(
        destination(one.operands[0]),
        (source(one.operands[1]),),
        by_lane(lambda a: int(f"{a:032b}"[::-1], 2)),
    )
