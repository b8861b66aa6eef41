"""Predicates, and what lanes exchange: comparisons, their logic, choices by them, votes, shuffles.

Of three values: an unknown predicate and False is False, or True is True.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.operands import (
    NOWHERE,
    Meaning,
    SourceOperand,
    UnknownOperand,
    assign,
    destination,
    is_predicate,
    source,
)
from tpkernels.gate.clock.values import ALL_LANES, LANES, WORD, Value, WarpState

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "T": lambda a, b: True,
    "F": lambda a, b: False,
}


def compare(one: Instruction) -> Meaning:
    """ISETP.op[.U32].combine[.EX] p, q, a, b, c [, low]: p = (a op b) combine c, q with not (a op b)."""
    holds = _COMPARISONS[one.modifiers[0]]
    combine = _COMBINATIONS[next(name for name in one.modifiers if name in _COMBINATIONS)]
    extended = "EX" in one.modifiers
    strict = one.modifiers[0] in ("LT", "LE", "GT", "GE")
    flip = 0x80000000 if strict and "U32" not in one.modifiers else 0
    p, q = (destination(text) for text in one.operands[:2])
    a, b, c = (source(text) for text in one.operands[2:5])
    low = source(one.operands[5]) if extended else SourceOperand("PT")
    if a.change or b.change:
        raise UnknownOperand(str(one))
    a_name, b_name = a.name, b.name
    no_more = c.name in ("PT", "UPT") and c.change is None and combine is _and
    equal_too = one.modifiers[0] != "NE"

    def found_of(registers: dict[str, Value]) -> Any:
        a, b = registers[a_name], registers[b_name]
        if a is None or b is None:
            return None
        if not extended:
            return holds(a ^ flip, b ^ flip) if flip else holds(a, b)
        below = low.of(registers)
        if below is None:
            return None
        if not strict:
            return holds(a, b) & below if equal_too else holds(a, b) | below
        above = operator.lt if one.modifiers[0][0] == "L" else operator.gt
        return above(a ^ flip, b ^ flip) | ((a == b) & below)

    def run(state: WarpState) -> None:
        registers = state.registers
        found = found_of(registers)
        if no_more:
            registers[p] = found
        else:
            registers[p] = combine(found, c.of(registers))
        if q != NOWHERE:
            registers[q] = combine(None if found is None else found ^ True, c.of(registers))

    return Meaning(run, (p, q), (a_name, b_name, c.name, low.name))


def _and(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    return None if a is None or b is None else a & b


def _or(a: Any, b: Any) -> Any:
    if a is True or b is True:
        return True
    return None if a is None or b is None else a | b


def _xor(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a ^ b


_COMBINATIONS: dict[str, Callable[[Any, Any], Any]] = {"AND": _and, "OR": _or, "XOR": _xor}


def logic(one: Instruction) -> Meaning:
    """PLOP3.LUT p, q, a, b, c, table, table of q."""
    p, q = (destination(text) for text in one.operands[:2])
    sources = tuple(source(text) for text in one.operands[2:5])
    tables = tuple(int(text, 16) for text in one.operands[5:7])
    plain = all(one.change is None for one in sources)
    names = tuple(one.name for one in sources)

    def run(state: WarpState) -> None:
        registers = state.registers
        values = [registers[name] for name in names] if plain else [one.of(registers) for one in sources]
        registers[p] = _look_up(tables[0], values)
        if q != NOWHERE:
            registers[q] = _look_up(tables[1], values)

    return Meaning(run, (p, q), names)


def _look_up(table: int, values: list[Any]) -> Any:
    a, b, c = values
    if a.__class__ is bool and b.__class__ is bool and c.__class__ is bool:
        return bool(table >> (a << 2 | b << 1 | c) & 1)
    if all(value is None or value.__class__ is bool for value in values):
        choices = [(False, True) if value is None else (value,) for value in values]
        found = {table >> (x << 2 | y << 1 | z) & 1 for x, y, z in product(*choices)}
        return bool(found.pop()) if len(found) == 1 else None
    if any(value is None for value in values):
        return None
    index = sum(np.multiply(value, 1 << 2 - place) for place, value in enumerate(values))
    return (table >> index & 1) == 1


def select(one: Instruction) -> Meaning:
    """SEL d, a, b, p: a where p, else b."""
    to = destination(one.operands[0])
    a, b, which = (source(text) for text in one.operands[1:4])

    def run(state: WarpState) -> None:
        registers = state.registers
        chosen = which.of(registers)
        if chosen is True:
            registers[to] = a.of(registers)
        elif chosen is False:
            registers[to] = b.of(registers)
        else:
            x, y = a.of(registers), b.of(registers)
            unknown = chosen is None or x is None or y is None
            registers[to] = None if unknown else np.where(chosen, x, y)

    return Meaning(run, (to,), (a.name, b.name, which.name))


def elect(one: Instruction) -> Meaning:
    """ELECT p, d, q: the first active lane, and its number."""
    p, to = destination(one.operands[0]), destination(one.operands[1])
    first = LANES == 0

    def run(state: WarpState) -> None:
        lane = 0 if state.mask is None else int(state.mask.argmax())
        state.registers[p] = first if lane == 0 else lane == LANES
        state.registers[to] = lane

    return Meaning(run, (p, to), ())


def vote(one: Instruction) -> Meaning:
    """VOTE.ANY/.ALL/.EQ [d,] p, q: over the active lanes; d has a bit for each lane where q."""
    operands = one.operands
    to = NOWHERE
    if not is_predicate(operands[0]):
        to, operands = destination(operands[0]), operands[1:]
    p, asked = destination(operands[0]), source(operands[1])
    kind = one.modifiers[0] if one.modifiers else "ANY"

    def run(state: WarpState) -> None:
        registers = state.registers
        value = asked.of(registers)
        registers[p] = registers[to] = None
        if value is None:
            return
        if value.__class__ is bool and state.mask is None:
            registers[p] = True if kind == "EQ" else value
            registers[to] = WORD if value else 0
            return
        active = ALL_LANES if state.mask is None else state.mask
        true = int((active & value).sum())
        count = int(active.sum())
        registers[p] = {"ANY": true > 0, "ALL": true == count, "EQ": true in (0, count)}[kind]
        registers[to] = int(((active & value).astype(np.int64) << LANES).sum())

    return Meaning(run, (p, to), (asked.name,))


def to_register(one: Instruction) -> Meaning:
    """P2R d, PR, a, mask: the predicates as bits, where the mask says; else those of a."""
    to, base = destination(one.operands[0]), source(one.operands[2])
    mask = int(one.operands[3], 16) if len(one.operands) > 3 else 0x7F
    names = _names(one.operands[1], mask)

    def compute(kept: Any, *values: Any) -> Any:
        result = kept & (WORD ^ mask)
        for (number, _), value in zip(names, values, strict=True):
            result = (
                result | np.left_shift(value, number)
                if isinstance(value, np.ndarray)
                else result | value << number
            )
        return result

    if set(one.modifiers) - {"B0"}:
        raise UnknownOperand(str(one))
    return assign(to, (base, *(SourceOperand(name) for _, name in names)), compute)


def from_register(one: Instruction) -> Meaning:
    """R2P PR, a, mask: bits become predicates."""
    value, (text,) = source(one.operands[1].split(".B")[0]), one.operands[2:3]
    first = 8 * int(one.operands[1].partition(".B")[2] or 0)
    names = _names(one.operands[0], int(text, 16))

    def run(state: WarpState) -> None:
        bits = state.registers[value.name]
        for number, name in names:
            state.registers[name] = None if bits is None else (bits >> first + number & 1) == 1

    return Meaning(run, tuple(name for _, name in names), (value.name,))


def special(one: Instruction) -> Meaning:
    """S2R, S2UR: blocks have one dimension of threads, and are the first of a cluster; clocks are unknown."""
    to, name = destination(one.operands[0]), one.operands[1]
    lane = 0 if one.opcode == "S2UR" else LANES

    def run(state: WarpState) -> None:
        ids = dict(zip(("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"), state.block.program, strict=True))
        known = {"SR_TID.X": lane + 32 * state.warp, "SR_LANEID": lane, "SR_WARPID": state.warp, **ids}
        zeros = ("SR_TID.Y", "SR_TID.Z", "SR_CgaCtaId")
        state.registers[to] = 0 if name in zeros else known.get(name)

    return Meaning(run, (to,))


def shuffle(one: Instruction) -> Meaning:
    """SHFL.BFLY/.IDX/.UP/.DOWN p, d, a, by, clamp: what is the same in all lanes stays; others by .BFLY."""
    operands = one.operands[1:] if is_predicate(one.operands[0]) else one.operands
    forgets = (destination(one.operands[0]),) if is_predicate(one.operands[0]) else ()
    to, value, by = destination(operands[0]), source(operands[1]).name, source(operands[2]).name
    kind = one.modifiers[0]

    def run(state: WarpState) -> None:
        found, distance = state.registers[value], state.registers[by]
        if isinstance(found, np.ndarray):
            if kind == "BFLY" and isinstance(distance, int):
                found = found[LANES ^ distance & 31]
            elif kind == "IDX" and isinstance(distance, int):
                found = int(found[distance & 31])
            else:
                found = None
        state.registers[to] = found

    return Meaning(run, (to,), (value, by), forgets)


def _names(kind: str, mask: int) -> tuple[tuple[int, str], ...]:
    """The predicates of a mask: "PR" or "UPR" """
    letter = {"PR": "P", "UPR": "UP"}[kind]
    return tuple((number, f"{letter}{number}") for number in range(7) if mask >> number & 1)
