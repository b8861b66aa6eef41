"""Where a warp goes, and where it meets others: branches, exits, barriers, mbarriers.

Lanes that part are executed one way after the other: those that branch wait in `WarpState.pending` until the
others come to the same place, to the BSYNC where all meet, or to their end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from tpkernels.gate.clock import effects
from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.effects import Effect
from tpkernels.gate.clock.operands import (
    Meaning,
    UnknownOperand,
    address,
    destination,
    following,
    is_predicate,
    source,
)
from tpkernels.gate.clock.values import ALL_LANES, WarpState, first

_FULL_PHASE = 0x100000  # an mbarrier is initialised with (this - arrivals) << 1


def target_of(one: Instruction) -> int | None:
    """The address that a branch names."""
    if one.opcode in ("BRA", "CALL") and (found := re.fullmatch(r"0x([0-9a-f]+)", one.operands[-1])):
        return int(found[1], 16)
    return None


def branch(one: Instruction, index_of: Mapping[int, int]) -> Meaning:
    """BRA [p,] target; CALL target; BRA.DIV is for lanes that part, which are executed otherwise here."""
    if "DIV" in one.modifiers or "CONV" in one.modifiers:
        return Meaning(None)
    target = target_of(one)
    if target is None:
        raise UnknownOperand(str(one))
    index = index_of[target]
    jump = effects.Jump(index)
    also = [source(text) for text in one.operands[:-1] if is_predicate(text)]

    def run(state: WarpState) -> Effect | None:
        mask = state.mask
        for condition in also:
            value = condition.of(state.registers)
            if value is None:
                state.guessed += 1
                return None
            if value is False:
                return None
            if value is not True:
                mask = np.asarray(value & (ALL_LANES if mask is None else mask), dtype=np.bool_)
        if mask is None:
            return jump
        active = ALL_LANES if state.active is None else state.active
        rest = active & ~mask
        if not rest.any():
            return jump
        if mask.any():
            state.pending.append((index, mask))
            state.active = rest
        return None

    return Meaning(run, reads=tuple(condition.name for condition in also), acts=True)


def back(one: Instruction, index_of: Mapping[int, int]) -> Meaning:
    """RET.REL.NODEC R4 0x0, which cuobjdump prints as an address."""
    found = re.fullmatch(r"(R\d+)\s+(0x[0-9a-f]+)", one.operands[0])
    if not found:
        raise UnknownOperand(str(one))
    name, base = found[1], int(found[2], 16)

    def run(state: WarpState) -> Effect | None:
        value = first(state.registers[name], state.mask)
        if value is None:
            state.guessed += 1
            return None
        return effects.Jump(index_of[value + base & 0xFFFFFFFF])

    return Meaning(run, reads=(name,), acts=True)


def leave(one: Instruction) -> Meaning:
    """EXIT, of some lanes or of all."""

    def run(state: WarpState) -> Effect | None:
        active = ALL_LANES if state.active is None else state.active
        leaving = active if state.mask is None else state.mask
        state.exited = leaving if state.exited is None else state.exited | leaving
        rest = active & ~leaving
        if rest.any():
            state.active = rest
            return None
        if state.pending:
            return _resume(state)
        return effects.Exit()

    return Meaning(run, acts=True)


def begin_join(one: Instruction) -> Meaning:
    """BSSY B0, target: the lanes here will meet at BSYNC B0."""
    register = one.operands[0]

    def run(state: WarpState) -> None:
        state.joins[register] = state.active, len(state.pending)

    return Meaning(run, acts=True)


def join(one: Instruction) -> Meaning:
    """BSYNC B0: those that wait elsewhere come first, then all go on."""
    register = one.operands[0]

    def run(state: WarpState) -> Effect | None:
        together, depth = state.joins.get(register, (state.active, len(state.pending)))
        if len(state.pending) > depth:
            return _resume(state)
        if together is None and state.exited is not None:
            together = ALL_LANES
        if together is not None and state.exited is not None:
            together = together & ~state.exited
        state.active = together
        return None

    return Meaning(run, acts=True)


def _resume(state: WarpState) -> Effect:
    index, state.active = state.pending.pop()
    return effects.Jump(index)


def barrier(one: Instruction) -> Meaning:
    """BAR.SYNC 0x0, BAR.RED 0x0, P0: of all warps of a block; others are of warps in roles."""
    named = [text for text in one.operands if not is_predicate(text) and text != "0x0"]
    if named or "ARV" in one.modifiers:
        raise UnknownOperand(str(one))
    return Meaning(lambda state: effects.BarrierSync(), acts=True)


def mbarrier(one: Instruction) -> Meaning:
    """SYNCS: .EXCH sets up, .ARRIVE counts, .PHASECHK waits, .CCTL ends."""
    handlers: dict[str, Callable[[Instruction], Meaning]] = {
        "EXCH": _initialise,
        "ARRIVE": _arrive,
        "PHASECHK": _await,
        "CCTL": lambda one: Meaning(None),
    }
    return handlers[one.modifiers[0]](one)


def _initialise(one: Instruction) -> Meaning:
    where, value = address(one.operands[1]), source(one.operands[2]).name
    forgets = following(destination(one.operands[0]))

    def run(state: WarpState) -> Effect:
        at, content = state.registers[value], first(where.of(state.registers))
        low = first(at)
        return effects.InitMbarrier(
            content, None if low is None else _FULL_PHASE - (low >> 1) & _FULL_PHASE - 1
        )

    return Meaning(run, reads=(*where.reads, value), forgets=forgets, acts=True)


def _arrive(one: Instruction) -> Meaning:
    """SYNCS.ARRIVE.TRANS64 RZ, [UR8], R2: a lane counts once, and expects so many bytes of copies."""
    if set(one.modifiers) - {"ARRIVE", "TRANS64"}:  # of other counts, or at another block's mbarrier
        raise UnknownOperand(str(one))
    where, value = address(one.operands[1]), source(one.operands[2]).name

    def run(state: WarpState) -> Effect:
        content, mask = state.registers[value], ALL_LANES if state.mask is None else state.mask
        expected = int(np.broadcast_to(0 if content is None else content, mask.shape)[mask].sum())
        return effects.Arrive(first(where.of(state.registers)), int(mask.sum()), expected)

    forgets = following(destination(one.operands[0]))
    return Meaning(run, reads=(*where.reads, value), forgets=forgets, acts=True)


def _await(one: Instruction) -> Meaning:
    """The predicate is true at once: the clock lets the warp go on when the phase is over."""
    to, where, value = destination(one.operands[0]), address(one.operands[1]), source(one.operands[2]).name

    def run(state: WarpState) -> Effect:
        state.registers[to] = True
        parity = first(state.registers[value])
        return effects.AwaitPhase(
            first(where.of(state.registers)), None if parity is None else parity >> 31 & 1
        )

    return Meaning(run, writes=(to,), reads=(*where.reads, value), acts=True)
