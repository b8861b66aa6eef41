"""Integer instructions: what they compute, for plain ints and arrays of lanes alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np

from tpkernels.gate.clock.instructions import Instruction
from tpkernels.gate.clock.lanes import by_lane, by_lane_all, settled
from tpkernels.gate.clock.operands import (
    NOWHERE,
    Meaning,
    Source,
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
from tpkernels.gate.clock.values import WORD, WarpState

SIGN = 0x80000000


def add(one: Instruction) -> Meaning:
    """IADD3 d, [carry out, [carry out,]] a, b, c [, carry in [, carry in]]; .64: of pairs."""
    if "64" in one.modifiers:
        return _add_pairs(one)
    to, carries, rest = results(one)
    count = 2 if one.opcode in ("IADD", "VIADD", "UIADD") else 3
    sources = tuple(source(text) for text in rest[:count])
    taken = tuple(source(text) for text in rest[count:] if text not in ("!PT", "!UPT"))

    def total(*values: Any) -> Any:
        return sum(values)

    if not carries:
        if len(sources) == 3 and sources[2].name in ("RZ", "URZ") and not taken:
            return assign(to, sources[:2], lambda a, b: a + b & WORD)
        if len(sources) == 3 and not taken:
            return assign(to, sources, lambda a, b, c: a + b + c & WORD)
        return assign(to, sources + taken, lambda *values: total(*values) & WORD)

    def with_carries(*values: Any) -> tuple[Any, ...]:
        result = total(*values)
        return (result & WORD, *(result > WORD + number * (WORD + 1) for number in range(len(carries))))

    return assign_all((to, *carries), sources + taken, with_carries)


def _add_pairs(one: Instruction) -> Meaning:
    to = following(destination(one.operands[0]))
    signs = tuple(-1 if text[0] == "-" and not text.startswith("-0x") else 1 for text in one.operands[1:])
    texts = (
        text.lstrip("-") if sign < 0 else text for sign, text in zip(signs, one.operands[1:], strict=True)
    )
    words = tuple(Source(name) for text in texts for name in pair(text))

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

    sources = (a, b, Source(low), Source(top), *taken)
    if high and carries:
        return assign_all((to, *carries), sources, by_lane_all(lambda *values: compute(*values)[1:]))
    if high:
        return assign(to, sources, lambda *values: compute(*values)[1])
    if carries:
        return assign_all((*following(to), *carries), sources, by_lane_all(compute))
    return assign_all(following(to), sources, compute)


def _multiply_low(to: str, a: Source, b: Source, c: Source, taken: tuple[Source, ...]) -> Meaning:
    zero = ("RZ", "URZ")
    if (a.name in zero or b.name in zero) and not taken:
        return copy((to,), (c.name,)) if c.change is None else assign(to, (c,), lambda x: x & WORD)
    if c.name in zero and not taken:
        return assign(to, (a, b), lambda x, y: x * y & WORD)
    if taken:
        return assign(to, (a, b, c, *taken), lambda x, y, z, carry: x * y + z + carry & WORD)
    return assign(to, (a, b, c), lambda x, y, z: x * y + z & WORD)


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
    if count.name.startswith("#") and not wraps and low.change is high.change is None:
        by = min(int(count.name[1:]), most)
        if left and not upper and by < 32:
            return assign(to, (low,), lambda a: a << by & WORD)
        if not left and upper and not signs:
            return assign(to, (high,), lambda a: settled(a >> by))
        if not left and upper:
            return assign(to, (high,), lambda a: settled(((a ^ SIGN) - SIGN) >> by & WORD))

    def compute(a: int, by: int, c: int) -> int:
        by = by & (most | 31 if most == 63 else 31) if wraps else min(by, most)
        whole = (((c ^ SIGN) - SIGN) if signs else c) << 32 | a
        whole = whole << by if left else whole >> by
        if upper or not left or most == 63:
            return (whole >> 32 if upper else whole) & WORD
        return whole & WORD

    return assign(to, (low, count, high), by_lane(compute))


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
            else assign(to, (Source("RZ"),), lambda a: WORD * (table & 1))
        )
    either = source(operands[5]) if len(operands) > 5 else Source("PT", lambda a: False)

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
    known: dict[tuple[int, tuple[int, ...]], Callable[..., Any]] = {
        (0xC0, (0, 1)): lambda a, b: a & b,
        (0xFC, (0, 1)): lambda a, b: a | b,
        (0x3C, (0, 1)): lambda a, b: a ^ b,
        (0x30, (0, 1)): lambda a, b: a & (b ^ WORD),
        (0x0C, (0, 1)): lambda a, b: (a ^ WORD) & b,
        (0x33, (1,)): lambda b: b ^ WORD,
        (0x0F, (0,)): lambda a: a ^ WORD,
        (0xF8, (0, 1, 2)): lambda a, b, c: a | b & c,
        (0xFE, (0, 1, 2)): lambda a, b, c: a | b | c,
        (0x78, (0, 1, 2)): lambda a, b, c: a ^ b & c,
        (0x96, (0, 1, 2)): lambda a, b, c: a ^ b ^ c,
        (0x80, (0, 1, 2)): lambda a, b, c: a & b & c,
        (0xE2, (0, 1, 2)): lambda a, b, c: a & b | c & (b ^ WORD),
    }
    if (table, used) in known:
        return known[table, used]

    def compute(*values: Any) -> Any:
        result: Any = 0
        for index in range(1 << len(used)):
            chosen = sum(1 << 2 - number for place, number in enumerate(used) if index >> place & 1)
            if table >> chosen & 1:
                term: Any = WORD
                for place, value in enumerate(values):
                    term = term & (value if index >> place & 1 else value ^ WORD)
                result = result | term
        return result

    return compute


def minimum_maximum(one: Instruction) -> Meaning:
    """VIMNMX d, a, b, P: the minimum where P, else the maximum.

    VIMNMX3: of a, b and c; VIADDMNMX: of a + b and c
    """
    *texts, which = one.operands[1:]
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

    return assign(destination(one.operands[0]), tuple(map(source, (*texts, which))), compute)


def absolute(one: Instruction) -> Meaning:
    return assign(
        destination(one.operands[0]), (source(one.operands[1]),), lambda a: abs((a ^ SIGN) - SIGN) & WORD
    )


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
        value = state.registers[name]
        if value.__class__ is np.ndarray:
            lane = 0 if state.mask is None else int(state.mask.argmax())
            value = int(value[lane])
        state.registers[to] = value

    return Meaning(run, (to,), (name,))
