"""Runs a kernel's warps without time: in turns between barriers, every wait for an mbarrier succeeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpkernels.gate.clock.cubin import Cubin
from tpkernels.gate.clock.effects import BarrierSync, Effect, Exit, Jump
from tpkernels.gate.clock.semantics import Step, translate
from tpkernels.gate.clock.values import Argument, Block, Constants, WarpState, initial_values

TOO_MANY = 3_000_000  # steps: the kernel does not end


@dataclass
class Ran:
    effects: list[tuple[int, Effect]] = field(default_factory=list)  # with the warp
    executed: Counter[str] = field(default_factory=Counter)  # of each opcode, over all warps
    by_warp: dict[int, Counter[str]] = field(default_factory=dict)
    exits: set[int] = field(default_factory=set)
    guessed: int = 0
    steps: int = 0

    def of(self, kind: type) -> list:
        return [effect for _, effect in self.effects if isinstance(effect, kind)]


def run_block(
    cubin: Cubin,
    arguments: Sequence[Argument],
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int] = (0, 0, 0),
    warps: int,
    program: list[Step] | None = None,
) -> Ran:
    program = translate(cubin) if program is None else program
    constants = Constants.of(cubin, arguments, grid, 32 * warps)
    shared = Block(block, constants, initial_values(cubin, constants))
    states = [WarpState(warp, shared) for warp in range(warps)]
    ran = Ran()
    waiting: dict[int, int] = {}  # warp -> the barrier that it waits at
    arrived: Counter[int] = Counter()
    needs: dict[int, int] = {}
    while len(ran.exits) < warps:
        moved = False
        for state in states:
            if state.warp in ran.exits or state.warp in waiting:
                continue
            moved = True
            effect = _until_barrier(program, state, ran)
            if isinstance(effect, BarrierSync):
                waiting[state.warp] = effect.number
                arrived[effect.number] += 32
                needs[effect.number] = effect.threads or 32 * (warps - len(ran.exits))
        for number, count in needs.items():
            if arrived[number] >= count:
                arrived[number] = 0
                waiting = {warp: at for warp, at in waiting.items() if at != number}
                moved = True
        assert moved, f"all wait: {waiting}, {arrived}, {needs}"
    ran.guessed = sum(state.guessed for state in states)
    return ran


def _until_barrier(program: list[Step], state: WarpState, ran: Ran) -> Effect:
    counts = ran.by_warp.setdefault(state.warp, Counter())
    while True:
        ran.steps += 1
        assert ran.steps < TOO_MANY, "does not end"
        step = program[state.at]
        state.at += 1
        one = step.instruction
        guard = state.registers[one.guard.lstrip("!")] if one.guard else True
        if not one.guard or guard is not (one.guard[0] == "!"):
            counts[one.opcode] += 1
        effect = step.execute(state) if step.execute else None
        if effect is None:
            continue
        if isinstance(effect, Jump):
            state.at = effect.index
            continue
        ran.effects.append((state.warp, effect))
        if isinstance(effect, Exit):
            ran.exits.add(state.warp)
            return effect
        if isinstance(effect, BarrierSync):
            return effect
