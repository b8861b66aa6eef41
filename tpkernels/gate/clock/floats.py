"""The few floating-point instructions that integers depend on: a division by what is not constant.

ptxas divides integers through a reciprocal in fp32, then mends the quotient. Registers hold a float's bits.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from tpkernels.gate.clock.instructions import Instruction
from tpkernels.gate.clock.lanes import by_lane, by_lane_all
from tpkernels.gate.clock.operands import (
    Meaning,
    Source,
    assign,
    assign_all,
    destination,
    following,
    pair,
    source,
)
from tpkernels.gate.clock.values import WORD


def reciprocal(one: Instruction) -> Meaning:
    """MUFU.RCP; the hardware is off by one in the last place at most, which the callers allow for."""
    return assign(destination(one.operands[0]), (source(one.operands[1]),), by_lane(_reciprocal))


def from_integer(one: Instruction) -> Meaning:
    """I2F[.U32|.U64|.S64].RP d, a: rounded up."""
    wide = {"U64", "S64"} & set(one.modifiers)
    bits = 64 if wide else 32
    unsigned = {"U32", "U64"} & set(one.modifiers)

    def compute(*words: int) -> int:
        number = sum(word << 32 * place for place, word in enumerate(words))
        if not unsigned and number >> bits - 1:
            number -= 1 << bits
        return _bits(_round_up(number))

    names = pair(one.operands[1]) if wide else (source(one.operands[1]).name,)
    return assign(destination(one.operands[0]), tuple(map(Source, names)), by_lane(compute))


def to_integer(one: Instruction) -> Meaning:
    """F2I.FTZ.U32.TRUNC.NTZ d, a, and .U64 into a pair."""
    wide = "U64" in one.modifiers
    most = (1 << (64 if wide else 32)) - 1

    def compute(a: int) -> int:
        number = _float(a)
        if number != number or number <= 0:
            return 0
        return most if number >= most else int(number)

    to = destination(one.operands[0])
    if wide:
        return assign_all(
            following(to),
            (source(one.operands[1]),),
            by_lane_all(lambda a: ((v := compute(a)) & WORD, v >> 32)),
        )
    return assign(to, (source(one.operands[1]),), by_lane(compute))


def half_constant(one: Instruction) -> Meaning | None:
    """HFMA2 d, -RZ, RZ, high, low: how ptxas moves a constant when other units are busy; else None."""
    if one.operands[1:3] != ("-RZ", "RZ") or len(one.operands) != 5 or "BF16_V2" in one.modifiers:
        return None
    try:
        high, low = (np.float16(float(text)).view(np.uint16) for text in one.operands[3:])
    except ValueError:  # a register
        return None
    value = int(high) << 16 | int(low)
    return assign(destination(one.operands[0]), (Source("RZ"),), lambda zero: value)


def _reciprocal(bits: int) -> int:
    number = _float(bits)
    if number == 0:
        return 0x7F800000 | bits & 0x80000000
    return _bits(np.float32(1) / np.float32(number))


def _round_up(number: int) -> np.float32:
    near = np.float32(number)
    if Fraction(float(near)) < number:
        return np.float32(np.nextafter(near, np.float32(math.inf)))
    return near


def _float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _bits(number: np.float32) -> int:
    return int(np.float32(number).view(np.uint32))
