"""One SM, event by event: its warps execute and time a program together, in the order in which they issue.

Four schedulers issue one instruction a cycle each, a warp's instructions in order. An instruction is executed
when it issues, so that what warps tell each other through shared memory and mbarriers comes in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpkernels.gate.clock import effects
from tpkernels.gate.clock.blocks import ThreadBlock, Warp
from tpkernels.gate.clock.effects import ClockFault, Deadlock, NeverEnds
from tpkernels.gate.clock.launch import SmLaunch
from tpkernels.gate.clock.resources import FIRST_BLOCK, NEXT_BLOCK
from tpkernels.gate.clock.sm import NOBODY_KNOWS, Sm
from tpkernels.gate.clock.table import PIPES, OpcodeKind, Operation
from tpkernels.gate.clock.values import Value

SCHEDULERS = 4
BUDGET = 4_000_000  # instructions of a run, many times what the longest launch that we look at takes
AWAITED = {"LDG", "LD", "ATOM", "ATOMG"}
GLOBAL = int(OpcodeKind.GLOBAL)
INACTIVE = 12.0  # latency of an instruction without an active lane


@dataclass(frozen=True, slots=True)
class Run:
    cycles: float  # from the start of the first block to the end of the last one
    tensor: float  # cycles that products take at full speed
    stalls: tuple[Mapping[str, float], ...]  # by warp of a block, all blocks together: cause -> cycles
    blocks: int  # that ended
    multiply: frozenset[int]  # warps of a block that issued products
    instructions: int  # issued
    guessed: int  # branches on unknown values
    fetched: int  # bytes, from global memory
    copied: int  # of these, by the copy engine
    stored: int  # bytes, to it
    serial_loads: Mapping[int, int]  # by warp of a block: that were awaited before the next was issued


def run(program: Sequence[Operation], launch: SmLaunch, budget: int = BUDGET) -> Run:
    return _Processor(program, launch, budget).run()


class _Processor:
    def __init__(self, program: Sequence[Operation], launch: SmLaunch, budget: int) -> None:
        self.operations, self.launch, self.budget = program, launch, budget
        # what sets a scoreboard may lie on a way that this warp does not take
        self.boards = {one.writes for one in self.operations} | {one.reads for one in self.operations}
        self.sm = Sm(launch.boxes)
        self.issue_free = [0.0] * SCHEDULERS
        self.pipe_free = [[0.0] * len(PIPES) for _ in range(SCHEDULERS)]
        self.programs = iter(launch.programs)
        self.blocks: list[ThreadBlock] = []
        self.end = 0.0  # of the last block that has ended
        self.stalls: list[dict[str, float]] = [{} for _ in range(launch.warps)]
        self.issued = self.guessed = 0

    def run(self) -> Run:
        for slot in range(self.launch.resident):
            self._start(slot, FIRST_BLOCK * slot)
        self._play()
        if any(block.running for block in self.blocks):
            raise Deadlock(self._stuck())
        return Run(
            cycles=self.end,
            tensor=self.sm.tensor_cores.busy,
            stalls=tuple(self.stalls),
            blocks=len(self.blocks),
            multiply=frozenset(self.sm.multiply),
            instructions=self.issued,
            guessed=self.guessed,
            fetched=self.sm.bandwidth.fetched,
            copied=self.sm.bandwidth.copied,
            stored=self.sm.bandwidth.stored,
            serial_loads=self.sm.serial_loads,
        )

    def _start(self, slot: int, when: float) -> None:
        program = next(self.programs, None)
        if program is None:
            return
        warps = self.launch.warps
        block = ThreadBlock(len(self.blocks), slot, warps)
        self.blocks.append(block)
        for number, state in enumerate(self.launch.states(program)):
            warp = Warp(block, number, (slot * warps + number) % SCHEDULERS, state, when)
            block.warps.append(warp)
            self.sm.push(when, warp)

    def _exit(self, warp: Warp, now: float) -> None:
        block = warp.block
        self.guessed += warp.state.guessed
        into = self.stalls[warp.number]
        for cause, cycles in (*warp.stalls.items(), ("instructions", warp.issuing)):
            into[cause] = into.get(cause, 0.0) + cycles
        block.running -= 1
        self.sm.release(block, now)
        if not block.running:
            self.end = max(self.end, now)
            self._start(block.slot, now + NEXT_BLOCK)

    def _stuck(self) -> str:
        waiting = [
            self._at(warp, warp.paused, f"waits for {warp.awaits}")
            for block in self.blocks
            for warp in block.warps
            if warp.paused is not None
        ]
        return "nobody can go on: " + "; ".join(waiting)

    def _play(self) -> None:
        """Until nothing happens any more.

        A warp's instructions are issued until another event comes first, or until the warp waits for one. All
        in one loop, which is where the clock spends its time: what it looks up is bound to local names.
        """
        sm, table, boards = self.sm, self.operations, self.boards
        heap, order = sm.heap, sm.order
        limits, issues, reactions = sm.limits, sm.issues, sm.reactions
        issue_free, pipe_free, pipe_names = self.issue_free, self.pipe_free, tuple(PIPES)
        nothing = (0.0, 0, None)
        now, _, event = heapq.heappop(heap) if heap else nothing
        while event is not None:
            if not isinstance(event, Warp):
                sm.land(event, now)
                now, _, event = heapq.heappop(heap) if heap else nothing
                continue
            warp, scheduler = event, event.scheduler
            pipes, done_at, state, stalls = pipe_free[scheduler], warp.done, warp.state, warp.stalls
            registers = state.registers
            while True:
                try:
                    operation = table[warp.at]
                except IndexError:
                    raise NeverEnds(f"{warp} runs past the last instruction without EXIT") from None
                due, cause, slow = now, "", -1
                for board in operation.waits:
                    done = done_at[board]
                    if done > due:
                        due, slow = done, board
                    elif done < 0.0 and board not in boards:
                        raise ClockFault(self._at(warp, operation, f"nothing sets scoreboard {board}"))
                here = not operation.guard or _active(operation.guard, registers)
                kind, pipe = operation.kind, operation.pipe
                if here:
                    if kind:
                        limit, why = limits[kind](warp, operation, now)
                        if limit > due:
                            if limit == NOBODY_KNOWS:
                                now, _, event = heapq.heappop(heap) if heap else nothing
                                break
                            due, cause, slow = limit, why, -1
                    if pipe and pipes[pipe] > due:
                        due, cause, slow = pipes[pipe], pipe_names[pipe], -1
                if issue_free[scheduler] > due:
                    due, cause, slow = issue_free[scheduler], "issue slots", -1
                if due > now:
                    if slow >= 0:
                        opcode = warp.causes[slow]
                        cause = f"scoreboard: {opcode}"
                        if opcode in AWAITED:
                            sm.loaded(warp, due, opcode, warp.issued[slow])
                    stalls[cause] = stalls.get(cause, 0.0) + due - now
                    if heap and heap[0][0] <= due:
                        now, _, event = heapq.heappushpop(heap, (due, order(), warp))
                        break
                    now = due
                # Issue.
                self.issued += 1
                if self.issued > self.budget:
                    raise NeverEnds(self._at(warp, operation, f"no end after {self.budget} instructions"))
                issue_free[scheduler] = now + 1.0
                warp.ready = now + operation.stall
                warp.issuing += operation.stall
                done = now + INACTIVE
                if here:
                    if pipe:
                        pipes[pipe] = now + operation.busy
                    done = issues[kind](warp, operation, now) if kind else now + operation.latency
                effect = None if operation.execute is None else operation.execute(state)
                warp.at += 1
                if effect is None:
                    if kind == GLOBAL:
                        done = now + INACTIVE
                else:
                    if effect.__class__ is effects.Exit:
                        self._exit(warp, now)
                        done = NOBODY_KNOWS
                    else:
                        try:
                            done = reactions[effect.__class__](warp, operation, effect, now)
                        except ClockFault as fault:
                            raise type(fault)(self._at(warp, operation, str(fault))) from None
                    if done == NOBODY_KNOWS:
                        now, _, event = heapq.heappop(heap) if heap else nothing
                        break
                if operation.writes is not None:
                    warp.hold(operation.writes, done, operation.opcode, now)
                if operation.reads is not None:
                    read = min(done, max(now + 12.0, done - operation.latency + 6.0))
                    warp.hold(operation.reads, read, operation.opcode, now)
                now = warp.ready
                if heap and heap[0][0] <= now:
                    now, _, event = heapq.heappushpop(heap, (now, order(), warp))
                    break

    def _at(self, warp: Warp, operation: Operation, fault: str) -> str:
        return f"{warp}, {operation.opcode} at {operation.instruction.address:#x}: {fault}"


def _active(guard: str, registers: Mapping[str, Value]) -> bool:
    """Does any lane take part? A guard of unknown value counts as true."""
    negated = guard[0] == "!"
    value = registers[guard[1:] if negated else guard]
    if value is None:
        return True
    if isinstance(value, np.ndarray):
        return not value.all() if negated else bool(value.any())
    return value is not negated
