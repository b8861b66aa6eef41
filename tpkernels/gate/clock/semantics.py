"""A kernel's code as steps that can be executed: what has no bearing on where warps go is left out.

Which integers matter is found backwards: from branches, addresses, barriers and guards to what they are
computed from, register by register wherever it is written. The rest, all of floating point, has no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tpkernels.gate.clock import control
from tpkernels.gate.clock.cubin import BYTES, Cubin, Instruction
from tpkernels.gate.clock.effects import Effect, UnknownTrips
from tpkernels.gate.clock.operands import Execute, Meaning
from tpkernels.gate.clock.table import Operation, meaning
from tpkernels.gate.clock.values import ALL_LANES, Mask, Value, WarpState

_BRANCHES = ("BRA", "EXIT", "RET", "CALL")


def translate(cubin: Cubin, wanted: Iterable[str] = ()) -> list[Operation]:
    """UnknownInstruction for what is not known here.

    wanted: registers whose values are asked for, as well as those that decide something
    """
    code = cubin.instructions
    index_of = {one.address: index for index, one in enumerate(code)}
    meanings = [meaning(one, index_of, cubin.kernel) for one in code]
    needed = _needed(code, meanings, set(wanted))
    meeting = {target for one in code if (target := control.target_of(one)) is not None}
    program = []
    for index, (one, what) in enumerate(zip(code, meanings, strict=True)):
        run = what.run if what.acts or not needed.isdisjoint(what.writes) else None
        run = _forgetting(run, tuple(name for name in what.forgets if name in needed))
        if run is not None:
            kept = tuple(name for name in what.writes if name[0] not in "U_" and name in needed)
            if one.guard:
                run = _guarded(run, one, kept, _over_rare_code(code, index), _loops(code, index))
            else:
                run = _on_active_lanes(run, kept)
        program.append(Operation(one, _meeting(run, index) if one.address in meeting else run))
    return program


def _over_rare_code(code: Sequence[Instruction], index: int) -> bool:
    """A branch over a call, an atomic, a look at a flag: the long way of a root, a wait that is over."""
    target = control.target_of(code[index])
    if target is None or target <= code[index].address:
        return False
    between = code[index + 1 : index + (target - code[index].address) // BYTES]
    return any(one.opcode == "CALL" or _looks(one) for one in between)


def _looks(one: Instruction) -> bool:
    """At what others may change."""
    return one.opcode == "ATOMG" or (one.opcode == "LDG" and "STRONG" in one.modifiers)


def _loops(code: Sequence[Instruction], index: int) -> bool:
    """A branch back that makes a loop of work; one that looks at a flag is a wait, which is over."""
    target = control.target_of(code[index])
    if target is None or target > code[index].address:
        return False
    return not any(_looks(one) for one in code[index - (code[index].address - target) // BYTES : index])


def _needed(code: Sequence[Instruction], meanings: Sequence[Meaning], needed: set[str]) -> set[str]:
    """The registers whose values decide anything."""
    rest = list(zip(code, meanings, strict=True))
    while True:
        later = []
        for one, what in rest:
            if what.acts or not needed.isdisjoint(what.writes) or not needed.isdisjoint(what.forgets):
                needed.update(what.reads)
                if one.guard:
                    needed.add(one.guard.lstrip("!"))
            else:
                later.append((one, what))
        if len(later) == len(rest):
            return needed
        rest = later


def _forgetting(run: Execute | None, names: tuple[str, ...]) -> Execute | None:
    if not names:
        return run
    unknown: dict[str, Value] = dict.fromkeys(names)

    def forget(state: WarpState) -> Effect | None:
        effect = None if run is None else run(state)
        state.registers.update(unknown)
        return effect

    return forget


def _on_active_lanes(run: Execute, writes: tuple[str, ...]) -> Execute:
    def execute(state: WarpState) -> Effect | None:
        return run(state) if state.active is None else _masked(run, state, writes, state.active)

    return execute


def _guarded(
    run: Execute, one: Instruction, writes: tuple[str, ...], over_rare: bool, loops: bool
) -> Execute:
    """over_rare: a branch over what data seldom asks for; loops: one back, by which no flag is awaited"""
    name, negated = one.guard.lstrip("!"), one.guard[0] == "!"
    branches = one.opcode in _BRANCHES

    def execute(state: WarpState) -> Effect | None:
        guard = state.registers[name]
        if guard is negated:
            return None
        if guard is None and branches:  # on data: not taken, which also leaves a loop that waits for it
            if loops and state.block.contents is not None:
                raise UnknownTrips(
                    f"{one}: how often a loop turns depends on data that the launch does not tell"
                )
            state.guessed += 1
            return run(state) if over_rare else None
        if guard is None or guard is (not negated):
            return run(state) if state.active is None else _masked(run, state, writes, state.active)
        mask: Mask = np.asarray(guard ^ negated, dtype=np.bool_)
        return _masked(run, state, writes, mask if state.active is None else mask & state.active)

    return execute


def _masked(run: Execute, state: WarpState, writes: tuple[str, ...], mask: Mask) -> Effect | None:
    """Executed by some lanes: the registers of the others stay.

    Where these were unknown they count as what the new ones are: code does not read what it has not written.
    """
    if not mask.any():
        return None
    if mask.all():
        return run(state)
    registers = state.registers
    before = [registers[name] for name in writes]
    state.mask = mask
    effect = run(state)
    state.mask = None
    for name, old in zip(writes, before, strict=True):
        new = registers[name]
        if old is not None and new is not None and old is not new:
            registers[name] = np.where(mask, new, old)
    return effect


def _meeting(run: Execute | None, index: int) -> Execute:
    """At the target of a branch: lanes that went there wait for the others, which may come now."""

    def execute(state: WarpState) -> Effect | None:
        while state.pending and state.pending[-1][0] == index:
            _, waiting = state.pending.pop()
            active = ALL_LANES if state.active is None else state.active
            together = active | waiting
            state.active = None if together.all() else together
        return None if run is None else run(state)

    return execute
