"""Loads, stores and copies: what moves, and the few values that pass through memory.

What comes from global or shared memory is unknown, but for integers that the launch gives. A spilled register
is known when it is read back.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tpkernels.gate.clock import arithmetic, effects
from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.operands import (
    Meaning,
    SourceOperand,
    UnknownOperand,
    address,
    destination,
    following,
    is_predicate,
    source,
)
from tpkernels.gate.clock.values import (
    ADDRESSES,
    BANK_ADDRESS,
    Contents,
    Mask,
    Value,
    WarpState,
    first,
)

_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def size_of(one: Instruction) -> int:
    """Bytes a lane."""
    return next((_SIZES[name] for name in one.modifiers if name in _SIZES), 4)


def words_of(one: Instruction) -> int:
    return max(1, size_of(one) // 4)


def global_load(one: Instruction) -> Meaning:
    """LDG d, desc[UR4][R2.64+0x10]."""
    place = next(text for text in one.operands if "[" in text)
    before = one.operands[: one.operands.index(place)]
    to = next(destination(text) for text in before if not is_predicate(text))
    words, where, size = following(to, words_of(one)), address(place), size_of(one)
    moved = _global(one, place, store=False, forgets=tuple(destination(t) for t in before if is_predicate(t)))
    move = moved.run
    assert move is not None

    def run(state: WarpState) -> effects.Effect | None:
        effect = move(state)  # first: an address may lie in the registers that are written
        at = where.of(state.registers)
        for number, name in enumerate(words):
            state.registers[name] = _content(state.block.contents, at, 4 * number, min(size, 4))
        return effect

    return Meaning(run, words, moved.reads, moved.forgets, acts=True)


def _content(contents: Contents | None, at: Value, more: int, size: int) -> Value:
    """What a tensor holds there, if the launch says so."""
    begin = first(at)
    if at is None or begin is None or not contents:
        return None
    held = contents.get(begin // ADDRESSES - 1)
    return held.word(at + more, size) if held else None


def global_store(one: Instruction) -> Meaning:
    """STG, RED: desc[UR4][R2.64], R4; ATOMG: p, d, address, R4."""
    place = next(text for text in one.operands if "[" in text)
    before = one.operands[: one.operands.index(place)]
    forgets: tuple[str, ...] = ()
    for text in before:
        to = destination(text)
        forgets += (to,) if is_predicate(text) else following(to, words_of(one))
    return _global(one, place, store=True, forgets=forgets)


def global_to_shared(one: Instruction) -> Meaning:
    """LDGSTS [R4], desc[UR4][R2.64], P0: copies where P0, else writes zeros."""
    wanted = source(one.operands[2]) if len(one.operands) > 2 else SourceOperand("PT")
    return _global(one, one.operands[1], store=False, shared=True, wanted=wanted)


def _global(
    one: Instruction,
    place: str,
    *,
    store: bool,
    forgets: tuple[str, ...] = (),
    shared: bool = False,
    wanted: SourceOperand | None = None,
) -> Meaning:
    where, size = address(place), size_of(one)
    full = effects.Global(32 * size, size, store, shared)

    def run(state: WarpState) -> effects.Global | None:
        mask = state.mask
        if wanted is not None:
            asked = wanted.of(state.registers)
            if asked is not None:
                mask = _both(mask, asked)
                if mask is not None and not mask.any():
                    return None
        at = where.of(state.registers)
        if at is None:
            if mask is None:
                return full
            lanes = int(mask.sum())
            return effects.Global(lanes * size, -(-lanes * size // 32), store, shared)
        if isinstance(at, int):
            lanes = 32 if mask is None else int(mask.sum())
            return effects.Global(lanes * size, 1, store, shared)
        touched = at if mask is None else at[mask]
        return effects.Global(len(touched) * size, len(set((touched >> 5).tolist())), store, shared)

    reads = where.reads if wanted is None else (*where.reads, wanted.name)
    return Meaning(run, reads=reads, forgets=forgets, acts=True)


def _both(mask: Mask | None, wanted: Any) -> Mask | None:
    if wanted is True:
        return mask
    if wanted is False:
        return np.zeros(32, dtype=np.bool_)
    found: Mask = wanted if mask is None else mask & wanted
    return found


def local_load(one: Instruction) -> Meaning:
    """LDL d, [R1+0x10]: a spilled register comes back."""
    where, size = address(one.operands[1]), size_of(one)
    words = following(destination(one.operands[0]), words_of(one))

    def run(state: WarpState) -> effects.Local:
        at = where.of(state.registers)
        for number, name in enumerate(words):
            state.registers[name] = state.local.get(at + 4 * number) if isinstance(at, int) else None
        return effects.Local(32 * size)

    return Meaning(run, words, where.reads, acts=True)


def local_store(one: Instruction) -> Meaning:
    where, size = address(one.operands[0]), size_of(one)
    names = following(source(one.operands[1]).name, words_of(one))

    def run(state: WarpState) -> effects.Local:
        at = where.of(state.registers)
        if isinstance(at, int):
            for number, name in enumerate(names):
                state.local[at + 4 * number] = state.registers[name] if size >= 4 else None
        else:
            state.local.clear()  # an array that is indexed: whatever was there
        return effects.Local(32 * size)

    return Meaning(run, reads=(*where.reads, *names), acts=True)


def constant_load(one: Instruction) -> Meaning:
    """LDC, ULDC d, c[0x0][0x210]: a move of one or two words; else the result is unknown."""
    if size_of(one) in (4, 8) and re.fullmatch(r"c\[0x[0-9a-f]+\]\[0x[0-9a-f]+\]", one.operands[1]):
        return arithmetic.move(one)
    return Meaning(None, forgets=following(destination(one.operands[0]), words_of(one)))


def tensor_copy(one: Instruction) -> Meaning:
    """UTMALDG.2D [UR8], [UR12]: UR8 into shared memory, UR9 the mbarrier."""
    if "MULTICAST" in one.modifiers:  # into other blocks of a cluster
        raise UnknownOperand(str(one))
    mbarrier = following(source(one.operands[0].strip("[]")).name)[1]
    low, high = following(source(one.operands[1].strip("[]")).name)

    def run(state: WarpState) -> effects.Copy:
        return effects.Copy(_descriptor(state, low, high), first(state.registers[mbarrier]))

    return Meaning(run, reads=(mbarrier, low, high), acts=True)


def tensor_put(one: Instruction) -> Meaning:
    """UTMASTG.2D, UTMAREDG.2D [UR8], [UR12]: from UR8 in shared memory."""
    low, high = following(source(one.operands[1].strip("[]")).name)
    return Meaning(lambda state: effects.Put(_descriptor(state, low, high)), reads=(low, high), acts=True)


def _descriptor(state: WarpState, low: str, high: str) -> int | None:
    a, b = first(state.registers[low]), first(state.registers[high])
    return None if a is None or b is None else (a | b << 32) - BANK_ADDRESS
