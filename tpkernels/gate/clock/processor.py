"""One SM, event by event: its warps execute and time a program together, in the order in which they issue.

Four schedulers issue one instruction a cycle each, a warp's instructions in order. An instruction is executed
when it issues, so that what warps tell each other through shared memory and mbarriers comes in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

from tpkernels.gate.clock import effects
from tpkernels.gate.clock.bandwidth import Bandwidth
from tpkernels.gate.clock.blocks import Block, Warp
from tpkernels.gate.clock.events import NOBODY_KNOWS, Events, Landing
from tpkernels.gate.clock.faults import ClockFault, Deadlock, NeverEnds, ScoreboardNeverSet
from tpkernels.gate.clock.machine import Machine
from tpkernels.gate.clock.operations import PIPES, Kind, Operation, active, operations
from tpkernels.gate.clock.reactions import Reactions
from tpkernels.gate.clock.semantics import Step
from tpkernels.gate.clock.timeline import Recorder, Run
from tpkernels.gate.clock.units import Units
from tpkernels.gate.clock.values import WarpState

SCHEDULERS = 4
BUDGET = 4_000_000  # instructions of a run, many times what the longest launch that we look at takes
LOADS = {"LDG", "LD", "ATOM", "ATOMG"}
GLOBAL = int(Kind.GLOBAL)
INACTIVE = 12.0  # latency of an instruction without an active lane


class Launched(Protocol):
    """What one SM is given of a launch."""

    @property
    def warps(self) -> int: ...  # of a block
    @property
    def resident(self) -> int: ...  # blocks at a time
    @property
    def registers(self) -> int: ...  # of a thread, at the start
    @property
    def boxes(self) -> Mapping[int, int]: ...  # bytes that a copy moves, by its descriptor
    @property
    def programs(
        self,
    ) -> Sequence[tuple[int, int, int]]: ...  # ids of the blocks that run here, in their order

    def states(self, program: tuple[int, int, int]) -> Sequence[WarpState]:
        """A `WarpState` for each warp of a new block."""


def run(
    program: Sequence[Step],
    launch: Launched,
    machine: Machine | None = None,
    *,
    drawing: bool = True,
    budget: int = BUDGET,
) -> Run:
    """drawing: whether spans of a time line are kept."""
    return _Processor(program, launch, machine or Machine(), drawing, budget).run()


class _Processor:
    def __init__(
        self, program: Sequence[Step], launch: Launched, machine: Machine, drawing: bool, budget: int
    ) -> None:
        self.launch, self.machine, self.budget = launch, machine, budget
        self.operations = operations(program, machine)
        # what sets a scoreboard may lie on a way that this warp does not take
        self.boards = {one.writes for one in self.operations} | {one.reads for one in self.operations}
        self.recorder = Recorder(drawing)
        self.events = Events(self.recorder)
        self.bandwidth = Bandwidth(machine)
        self.units = Units(self.events, self.bandwidth)
        self.reactions = Reactions(self.events, self.bandwidth, launch.boxes)
        self.issue_free = [0.0] * SCHEDULERS
        self.pipe_free = [[0.0] * len(PIPES) for _ in range(SCHEDULERS)]
        self.programs = iter(launch.programs)
        self.blocks: list[Block] = []
        self.lives: dict[int, tuple[float, float]] = {}  # of blocks that have ended
        self.stalls: list[dict[str, float]] = [{} for _ in range(launch.warps)]
        self.issued = self.guessed = 0

    def run(self) -> Run:
        for slot in range(self.launch.resident):
            self._start(slot, self.machine.first_block * slot)
        self._play()
        if any(block.running for block in self.blocks):
            raise Deadlock(self._stuck())
        return Run(
            cycles=max((end for _, end in self.lives.values()), default=0.0),
            tensor=self.units.tensor_cores.busy,
            stalls=tuple(self.stalls),
            blocks=tuple(self.lives[block.number] for block in self.blocks),
            instructions=self.issued,
            guessed=self.guessed,
            fetched=self.bandwidth.fetched,
            copied=self.bandwidth.copied,
            stored=self.bandwidth.stored,
            marks=tuple(self.recorder.marks),
            waits=tuple(self.recorder.waits),
            spans=tuple(self.recorder.spans),
        )

    def _start(self, slot: int, when: float) -> None:
        program = next(self.programs, None)
        if program is None:
            return
        warps = self.launch.warps
        block = Block(len(self.blocks), slot, warps, self.launch.registers, when)
        self.blocks.append(block)
        for number, state in enumerate(self.launch.states(program)):
            warp = Warp(block, number, (slot * warps + number) % SCHEDULERS, state, when)
            block.warps.append(warp)
            self.events.push(when, warp)

    def _exit(self, warp: Warp, now: float) -> None:
        block = warp.block
        self.events.close_epilogue(warp, now)
        self.guessed += warp.state.guessed
        into = self.stalls[warp.number]
        for cause, cycles in (*warp.stalls.items(), ("instructions", warp.issuing)):
            into[cause] = into.get(cause, 0.0) + cycles
        block.running -= 1
        for barrier in block.barriers.values():
            self.reactions.release(block, barrier, now)
        if not block.running:
            self.lives[block.number] = block.start, now
            self._start(block.slot, now + self.machine.next_block)

    def _stuck(self) -> str:
        waiting = [
            f"{self._at(warp, warp.paused, f'waits for {warp.awaits}')}"
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
        events, table, boards = self.events, self.operations, self.boards
        heap, order, drawing = events.heap, events.order, self.recorder.drawing
        limits, issues, reactions = self.units.limits, self.units.issues, self.reactions.of
        issue_free, pipe_free = self.issue_free, self.pipe_free
        nothing = (0.0, 0, None)
        now, _, event = heapq.heappop(heap) if heap else nothing
        while event is not None:
            if isinstance(event, Landing):
                self.reactions.land(event, now)
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
                        raise ScoreboardNeverSet(
                            self._at(warp, operation, f"nothing sets scoreboard {board}")
                        )
                here = not operation.guard or active(operation.guard, registers)
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
                        due, cause, slow = pipes[pipe], PIPES[pipe], -1
                if issue_free[scheduler] > due:
                    due, cause, slow = issue_free[scheduler], "issue slots", -1
                if due > now:
                    if slow >= 0:
                        opcode = warp.causes[slow]
                        cause = f"scoreboard: {opcode}"
                        if opcode in LOADS:
                            events.loaded(warp, now, due, opcode, warp.at, warp.issued[slow])
                    if drawing:
                        events.stalled(warp, now, due, cause)
                    else:
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
                        events.mark(warp, "EXIT", now, warp.at - 1)
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
        return f"{warp}, {operation.opcode} at {operation.step.instruction.address:#x}: {fault}"
