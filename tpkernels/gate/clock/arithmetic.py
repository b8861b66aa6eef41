"""What arithmetic computes: integers, bits, and the few floats that integers depend on.

For plain ints and arrays of lanes alike. Floats are part of a division by what is not constant: ptxas divides
integers through a reciprocal in fp32, then mends the quotient. Registers hold a float's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, reduce
from typing import Any

import numpy as np

from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.operands import (
    NOWHERE,
    Meaning,
    SourceOperand,
    UnknownOperand,
    assign,
    assign_all,
    copy,
    destination,
    following,
    is_predicate,
    pair,
    results,
    source,
)
from tpkernels.gate.clock.values import WORD, Value, WarpState, first

SIGN = 0x80000000
ZERO = ("RZ", "URZ")


def _settled(value: Any) -> Any:
    """A plain int where all lanes agree: a warp's number is found by shifting its threads'."""
    if value.__class__ is np.ndarray and (value == value[0]).all():
        return int(value[0])
    return value


def _by_lane(compute: Callable[..., int]) -> Callable[..., Value]:
    """A function of plain ints, for what is rare with lanes: one after the other."""
    found = _by_lane_all(lambda *values: (compute(*values),))
    return lambda *values: _settled(found(*values)[0])


def _by_lane_all(compute: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Value, ...]]:
    def run(*values: Any) -> tuple[Value, ...]:
        if all(value.__class__ is not np.ndarray for value in values):
            return compute(*values)
        lanes = np.broadcast_arrays(*values, np.empty(32))[:-1]
        found = [compute(*map(int, lane)) for lane in zip(*lanes, strict=True)]
        return tuple(np.array(column) for column in zip(*found, strict=True))

    return run


def _computed(one: Instruction, count: int, compute: Callable[..., Value]) -> Meaning:
    """d, a, b, ...: d becomes compute(a, b, ...)."""
    return assign(destination(one.operands[0]), tuple(map(source, one.operands[1 : count + 1])), compute)


def add(one: Instruction) -> Meaning:
    """IADD3 d, [carry out, [carry out,]] a, b, c [, carry in [, carry in]]; .64: of pairs."""
    if "64" in one.modifiers:
        return _add_pairs(one)
    to, carries, rest = results(one)
    count = 2 if one.opcode in ("IADD", "VIADD", "UIADD") else 3
    sources = tuple(source(text) for text in rest[:count])
    taken = tuple(source(text) for text in rest[count:] if text not in ("!PT", "!UPT"))

    if not carries:
        return assign(to, sources + taken, lambda *values: sum(values) & WORD)

    def with_carries(*values: Any) -> tuple[Any, ...]:
        result = sum(values)
        return (result & WORD, *(result > WORD + number * (WORD + 1) for number in range(len(carries))))

    return assign_all((to, *carries), sources + taken, with_carries)


def _add_pairs(one: Instruction) -> Meaning:
    to = following(destination(one.operands[0]))
    signs = tuple(-1 if text[0] == "-" and not text.startswith("-0x") else 1 for text in one.operands[1:])
    texts = (
        text.lstrip("-") if sign < 0 else text for sign, text in zip(signs, one.operands[1:], strict=True)
    )
    words = tuple(SourceOperand(name) for text in texts for name in pair(text))

    def compute(*values: Any) -> tuple[Any, ...]:
        total = sum(s * (a + (b << 32)) for s, a, b in zip(signs, values[::2], values[1::2], strict=True))
        return total & WORD, total >> 32 & WORD

    return assign_all(to, words, compute)


def multiply_add(one: Instruction) -> Meaning:
    """IMAD d, a, b, c; .WIDE and .HI take a pair c; .X a carry in."""
    to, carries, rest = results(one)
    a, b = source(rest[0]), source(rest[1])
    taken = tuple(source(text) for text in rest[3:] if text not in ("!PT", "!UPT"))
    wide, high = "WIDE" in one.modifiers, "HI" in one.modifiers
    if not wide and not high:
        if carries:
            raise UnknownOperand(str(one))
        return _multiply_low(to, a, b, source(rest[2]), taken)
    signs = "U32" not in one.modifiers
    minus = rest[2].startswith("-") and not rest[2].startswith("-0x")
    low, top = pair(rest[2].lstrip("-") if minus else rest[2])

    def compute(x: Any, y: Any, c_low: Any, c_high: Any, *more: Any) -> tuple[Any, ...]:
        if signs:
            x, y = ((x & WORD) ^ SIGN) - SIGN, ((y & WORD) ^ SIGN) - SIGN
        c = c_low + (c_high << 32)
        result = x * y + (-c if minus else c) + sum(more)  # wraps in 64 bits where there are lanes
        if carries:
            return result & WORD, result >> 32 & WORD, result >> 64 & 1 == 1
        return result & WORD, result >> 32 & WORD

    sources = (a, b, SourceOperand(low), SourceOperand(top), *taken)
    if high and carries:
        return assign_all((to, *carries), sources, _by_lane_all(lambda *values: compute(*values)[1:]))
    if high:
        return assign(to, sources, lambda *values: compute(*values)[1])
    if carries:
        return assign_all((*following(to), *carries), sources, _by_lane_all(compute))
    return assign_all(following(to), sources, compute)


def _multiply_low(
    to: str, a: SourceOperand, b: SourceOperand, c: SourceOperand, taken: tuple[SourceOperand, ...]
) -> Meaning:
    if (a.name in ZERO or b.name in ZERO) and not taken:  # a move
        return assign(to, (c,), lambda x: x & WORD)
    return assign(to, (a, b, c, *taken), lambda x, y, z, *carry: x * y + z + sum(carry) & WORD)


def shift_add(one: Instruction) -> Meaning:
    """LEA d, [carry,] a, b, shift: (a << shift) + b; .HI: the high word of c, a; .SX32: c is a's sign."""
    to, carries, rest = results(one)
    upper, extended = "HI" in one.modifiers, "SX32" in one.modifiers
    inputs = 3 if upper and not extended else 2
    shift = int(rest[inputs], 16)
    taken = tuple(source(text) for text in rest[inputs + 1 :] if text not in ("!PT", "!UPT"))
    sources = (*(source(text) for text in rest[:inputs]), *taken)
    if upper and any(one.change for one in sources[:1]):
        raise UnknownOperand(str(one))

    def result(a: Any, b: Any, *more: Any) -> Any:
        if not upper:
            return (a << shift & WORD) + b + sum(more)
        if extended:
            return (((a ^ SIGN) - SIGN) << shift >> 32 & WORD) + b + sum(more)
        c, *carry = more
        return ((c << shift | a >> 32 - shift) & WORD) + b + sum(carry)

    if carries:
        return assign_all((to, *carries), sources, lambda *v: ((r := result(*v)) & WORD, r > WORD))
    return assign(to, sources, lambda *values: result(*values) & WORD)


def shift(one: Instruction) -> Meaning:
    """SHF.L/.R[.W].type[.HI] d, low, count, high: a word of the pair, shifted."""
    to, (low, count, high) = destination(one.operands[0]), (source(text) for text in one.operands[1:4])
    left, wraps, upper = "L" in one.modifiers, "W" in one.modifiers, "HI" in one.modifiers
    signs = any(kind in one.modifiers for kind in ("S32", "S64"))
    most = 63 if {"S64", "U64"} & set(one.modifiers) else 32

    def compute(a: int, by: int, c: int) -> int:
        by = by & (most | 31 if most == 63 else 31) if wraps else min(by, most)
        whole = (((c ^ SIGN) - SIGN) if signs else c) << 32 | a
        whole = whole << by if left else whole >> by
        return (whole >> 32 if upper else whole) & WORD

    return assign(to, (low, count, high), _by_lane(compute))


def logic(one: Instruction) -> Meaning:
    """LOP3.LUT [P,] d, a, b, c, table, P: bit by bit, and whether anything is left."""
    predicate = NOWHERE
    operands = one.operands
    if is_predicate(operands[0]):
        predicate, operands = destination(operands[0]), operands[1:]
    to = destination(operands[0])
    table = int(operands[4], 16)
    texts = operands[1:4]
    used = tuple(number for number in range(3) if _depends(table, 2 - number))
    sources = tuple(source(texts[number]) for number in used)
    function = _of_table(table, used)
    if predicate == NOWHERE:
        return (
            assign(to, sources, function)
            if used
            else assign(to, (SourceOperand("RZ"),), lambda a: WORD * (table & 1))
        )
    either = source(operands[5]) if len(operands) > 5 else SourceOperand("PT", lambda a: False)

    def compute(*values: Any) -> tuple[Any, Any]:
        result = function(*values[:-1])
        return result, (result != 0) | values[-1]

    return assign_all((to, predicate), (*sources, either), compute)


def _depends(table: int, bit: int) -> bool:
    """Whether the table's result depends on this bit of its index: 2 is a, 1 is b, 0 is c."""
    return any((table >> index & 1) != (table >> (index ^ 1 << bit) & 1) for index in range(8))


@cache
def _of_table(table: int, used: tuple[int, ...]) -> Callable[..., Any]:
    """The function of the operands that matter (0 is a) which is 1 where the table is."""
    terms = [
        [index >> place & 1 for place in range(len(used))]
        for index in range(1 << len(used))
        if table >> sum(1 << 2 - number for place, number in enumerate(used) if index >> place & 1) & 1
    ]

    def compute(*values: Any) -> Any:
        result: Any = 0
        for holds in terms:
            term: Any = WORD
            for value, is_set in zip(values, holds, strict=True):
                term = term & (value if is_set else value ^ WORD)
            result = result | term
        return result

    return compute


def minimum_maximum(one: Instruction) -> Meaning:
    """VIMNMX d, a, b, P: the minimum where P, else the maximum.

    VIMNMX3: of a, b and c; VIADDMNMX: of a + b and c
    """
    flip = 0 if "U32" in one.modifiers else SIGN
    adds = one.opcode == "VIADDMNMX"

    def compute(*values: Any) -> Any:
        *numbers, least = values
        if adds:
            a, b, c = numbers
            numbers = [a + b & WORD, c]
        numbers = [(number & WORD) ^ flip for number in numbers]
        if all(isinstance(number, int) for number in numbers) and isinstance(least, bool):
            return (min(numbers) if least else max(numbers)) ^ flip
        return np.where(least, reduce(np.minimum, numbers), reduce(np.maximum, numbers)) ^ flip

    return _computed(one, len(one.operands) - 1, compute)


def absolute(one: Instruction) -> Meaning:
    return _computed(one, 1, lambda a: abs((a ^ SIGN) - SIGN) & WORD)


def move(one: Instruction) -> Meaning:
    """MOV, UMOV, ULDC and LDC at a fixed place; .64: a pair."""
    count = 2 if "64" in one.modifiers else 1
    to = destination(one.operands[0])
    found = source(one.operands[1])
    return copy(
        following(to, count)[:count] if count > 1 else (to,),
        following(found.name, count) if count > 1 else (found.name,),
    )


def clear(one: Instruction) -> Meaning:
    """CS2R d, SRZ: a pair of zeros; other special registers are clocks."""
    count = 1 if "32" in one.modifiers else 2
    to = following(destination(one.operands[0]), 2)[:count]
    if one.operands[1] == "SRZ":
        return copy(to, ("RZ",) * count)
    return Meaning(None, forgets=to)


def first_lane(one: Instruction) -> Meaning:
    """R2UR d, a: what the first active lane has."""
    to, name = destination(one.operands[-2]), source(one.operands[-1]).name

    def run(state: WarpState) -> None:
        state.registers[to] = first(state.registers[name], state.mask)

    return Meaning(run, (to,), (name,))


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
    return _computed(one, 3, _by_lane(compute))


def extend(one: Instruction) -> Meaning:
    """SGXT d, a, width: the low bits, with their sign; .U32: without."""
    unsigned = "U32" in one.modifiers

    def compute(a: int, width: int) -> int:
        if width >= 32:
            return a
        low = a & (1 << width) - 1
        return low if unsigned or not width or not low >> width - 1 else low - (1 << width) & WORD

    return _computed(one, 2, _by_lane(compute))


def bit_mask(one: Instruction) -> Meaning:
    """BMSK d, position, width."""
    return _computed(one, 2, _by_lane(lambda at, width: ((1 << min(width, 32)) - 1 << min(at, 32)) & WORD))


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
        found = _by_lane(compute)
        return assign_all((to, *carries), (source(rest[0]),), lambda a: ((r := found(a)), r != WORD))
    return assign(to, (source(rest[0]),), _by_lane(compute))


def count_ones(one: Instruction) -> Meaning:
    return _computed(one, 1, _by_lane(int.bit_count))


def reverse_bits(one: Instruction) -> Meaning:
    return _computed(one, 1, _by_lane(lambda a: int(f"{a:032b}"[::-1], 2)))


def reciprocal(one: Instruction) -> Meaning | None:
    """MUFU.RCP; the hardware is off by one in the last place at most, which the callers allow for.

    Here and below: None where it is a float that no integer depends on.
    """
    if one.modifiers != ("RCP",) or not one.operands[1].startswith("R"):
        return None
    return _computed(one, 1, _by_lane(_reciprocal))


def from_integer(one: Instruction) -> Meaning | None:
    """I2F[.U32|.U64|.S64].RP d, a: rounded up."""
    if "RP" not in one.modifiers:
        return None
    wide = {"U64", "S64"} & set(one.modifiers)
    bits = 64 if wide else 32
    unsigned = {"U32", "U64"} & set(one.modifiers)

    def compute(*words: int) -> int:
        number = sum(word << 32 * place for place, word in enumerate(words))
        if not unsigned and number >> bits - 1:
            number -= 1 << bits
        return _bits(_round_up(number))

    names = pair(one.operands[1]) if wide else (source(one.operands[1]).name,)
    return assign(destination(one.operands[0]), tuple(map(SourceOperand, names)), _by_lane(compute))


def to_integer(one: Instruction) -> Meaning | None:
    """F2I.FTZ.U32.TRUNC.NTZ d, a, and .U64 into a pair."""
    if "TRUNC" not in one.modifiers or not {"U32", "U64"} & set(one.modifiers):
        return None
    wide = "U64" in one.modifiers
    most = (1 << (64 if wide else 32)) - 1

    def compute(a: int) -> int:
        number = _float(a)
        if number != number or number <= 0:
            return 0
        return most if number >= most else int(number)

    if not wide:
        return _computed(one, 1, _by_lane(compute))
    to, words = following(destination(one.operands[0])), (source(one.operands[1]),)
    return assign_all(to, words, _by_lane_all(lambda a: ((v := compute(a)) & WORD, v >> 32)))


def half_constant(one: Instruction) -> Meaning | None:
    """HFMA2 d, -RZ, RZ, high, low: how ptxas moves a constant when other units are busy."""
    if one.operands[1:3] != ("-RZ", "RZ") or len(one.operands) != 5 or "BF16_V2" in one.modifiers:
        return None
    try:
        high, low = (np.float16(float(text)).view(np.uint16) for text in one.operands[3:])
    except ValueError:  # a register
        return None
    value = int(high) << 16 | int(low)
    return assign(destination(one.operands[0]), (SourceOperand("RZ"),), lambda zero: value)


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
