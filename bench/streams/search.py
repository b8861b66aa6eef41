"""Executes a program in many orders: each must end, with ordered accesses and the same results.

Finds unordered accesses to memory, by torch's own tracking of streams and events.

Each program of a kernel that waits counts as a stream of its own: it begins after the tasks before the
kernel, and tasks after the kernel begin after all of its programs. A flag is an event: a writer of the flag
records it, a reader waits for it.

Executes a program in one order, chosen by a seed; tasks wait for streams, processors and peers.

Finds products that take all processors while a collective may be in flight.

A persistent product has a program for each processor that it counts on. If a collective holds some of these,
the remaining programs run in a second wave, and the product takes twice as long. If the product comes first,
the collective waits until it ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor
from torch.cuda._sanitizer import StreamSynchronizations

from bench.streams.device import MachineError, Program, Span, Step, Task, TransferEnd

_Access = tuple[Task, int, int]  # with stream and number, as torch counts them


class Races:
    """Finds races in one execution."""

    def __init__(self, cells: Mapping[Span, range]) -> None:
        """cells: of each span, the ranges of bytes that no task's span splits"""
        self._cells, self._syncs, self._number = cells, StreamSynchronizations(), 0
        self._streams: dict[Hashable, int] = {}
        self._events: dict[Hashable, int] = {}
        self._writes: dict[int, _Access] = {}  # the last write of each cell
        self._reads: dict[int, list[_Access]] = {}  # reads since then

    def begin(self, task: Task) -> None:
        stream = self._stream(task)
        for before in task.after:
            self._acquire(stream, before)
        if _waits(task):
            self._release(stream, ("begun", task.number))
            for program in range(len(task.programs)):
                self._acquire(self._stream(task, program), ("begun", task.number))

    def arrive(self, task: Task) -> None:
        """Release a rank's accesses before a collective to its peers."""
        self._release(self._stream(task), ("arrived", task.number))

    def meet(self, task: Task, sources: Iterable[Task]) -> None:
        """Order a rank's later accesses after those of ranks from which it receives."""
        for source in sources:
            self._acquire(self._stream(task), ("arrived", source.number))

    def step(self, task: Task, program: int, step: Step) -> None:
        """Record a step's accesses; raise if they are not ordered after earlier conflicting accesses."""
        stream = self._stream(task, program if _waits(task) else None)
        for flag, _ in step.awaits:
            self._acquire(stream, ("flag", flag))
        self._number += 1
        self._syncs.update_seq_num(stream, self._number)
        access = task, stream, self._number
        for span in step.reads:
            for cell in self._cells[span]:
                self._require_ordered(access, self._writes.get(cell), span, "reads what")
                self._reads.setdefault(cell, []).append(access)
        for span in step.writes:
            for cell in self._cells[span]:
                reads = self._reads.pop(cell, ())
                for read in reads:
                    self._require_ordered(access, read, span, "writes what", "reads")
                if not reads:
                    self._require_ordered(access, self._writes.get(cell), span, "writes what")
                self._writes[cell] = access

    def raised(self, task: Task, program: int, flags: Sequence[int]) -> None:
        stream = self._stream(task, program if _waits(task) else None)
        for flag in flags:
            self._release(stream, ("flag", flag))

    def end(self, task: Task) -> None:
        stream = self._stream(task)
        if _waits(task):
            for program in range(len(task.programs)):
                self._release(self._stream(task, program), "program")
                self._acquire(stream, "program")
        self._release(stream, task.number)

    def _require_ordered(
        self, access: _Access, before: _Access | None, span: Span, does: str, did: str = "writes"
    ) -> None:
        task, stream, _ = access
        if before is not None and not self._syncs.is_ordered_after(stream, before[2], before[1]):
            raise MachineError(
                f"{task} {does} {before[0]} {did}, in no order: {span[1] - span[0]} bytes at {span[0]:#x}"
            )

    def _stream(self, task: Task, program: int | None = None) -> int:
        key = task.rank, task.stream, program
        if key not in self._streams:
            self._streams[key] = len(self._streams) + 1
        return self._streams[key]

    def _release(self, stream: int, event: Hashable) -> None:
        self._syncs.record_state(self._events.setdefault(event, len(self._events)), stream)

    def _acquire(self, stream: int, event: Hashable) -> None:
        if (number := self._events.get(event)) is not None:
            self._syncs.stream_wait_for_event(stream, number)


def _waits(task: Task) -> bool:
    """Whether programs of a kernel wait for flags, which then order each program by itself."""
    return len(task.programs) > 1 and any(step.awaits for steps in task.programs for step in steps)


class _Running:
    """A task that can run: its programs with a processor, and the next step of each."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.next = [0] * len(task.programs)  # step of each program
        self.resident: list[int] = []  # unfinished programs with a processor
        self.placed = 0  # programs that have got one
        self.left = len(task.programs)  # unfinished programs
        self.arrived = False  # at a collective
        self.moved = 0  # ends of its messages
        self.sources: list[Task] = []  # senders of its messages
        self.terms: dict[int, Tensor] = {}  # of a sum, by rank


class Execution:
    """One order of a program's tasks."""

    def __init__(self, program: Program, seed: int, *, races: bool = True, gives_up: bool = False) -> None:
        """gives_up: kernels wait for a while only, and leave word of the flag that is late"""
        self.program, self.seed = program, seed
        self._random = Random(seed)
        self._even = self._random.random() < 0.5  # whether tasks are equally likely, or streams have speeds
        self._speed: dict[tuple[int, int], float] = {}
        self._free = [program.processors] * program.ranks
        self._waits_for = [len(task.after | task.held_up_by) for task in program.tasks]
        # ends that wait for the other end
        self._ends: dict[tuple[Hashable, bool], tuple[_Running, TransferEnd]] = {}
        self._races = Races(program.cells) if races else None
        self._gives_up, self._late = gives_up, False  # whether waits of kernels run out, and have
        self.steps = 0

    def run(self) -> None:
        """Run all tasks; raise a MachineError that names the problem of this order."""
        for memory in self.program.memories:
            memory.reset()
        running = [_Running(task) for task in self.program.tasks if not self._waits_for[task.number]]
        stuck: list[_Running] = []
        while running or stuck:
            if not running and self._gives_up and not self._late:
                self._late, running, stuck = True, stuck, []
            if not running:
                raise MachineError(self._deadlock(stuck))
            index = self._choose(running)
            one = running[index]
            ended = self._advance(one)
            if ended is None:  # it cannot continue now
                running[index] = running[-1]
                running.pop()
                stuck.append(one)
                continue
            running += stuck
            stuck.clear()
            for done in ended:
                running.remove(done)
                for number in self.program.then[done.task.number]:
                    self._waits_for[number] -= 1
                    if not self._waits_for[number]:
                        running.append(_Running(self.program.tasks[number]))

    def _choose(self, running: list[_Running]) -> int:
        if self._even or len(running) == 1:
            return int(self._random.random() * len(running))
        if self._random.random() < 0.02:
            self._speed.clear()
        speeds = self._speed
        best, found = -1.0, 0
        for index, one in enumerate(running):
            key = one.task.rank, one.task.stream
            speed = speeds.get(key)
            if speed is None:
                speed = speeds[key] = self._random.random()
            if speed > best:
                best, found = speed, index
        return found

    def _advance(self, one: _Running) -> list[_Running] | None:
        """Run a step of a task; return the tasks that it ends, or None if no step can run."""
        task = one.task
        placed = self._place(one)
        if task.ends:
            return self._meet(one) or ([] if placed else None)
        if not one.resident:
            return [] if placed else None
        start = int(self._random.random() * len(one.resident))
        for turn in range(len(one.resident)):
            program = one.resident[(start + turn) % len(one.resident)]
            steps = task.programs[program]
            step = steps[one.next[program]]
            late = [i for i, (flag, word) in enumerate(step.awaits) if _word(flag) != _word(word)]
            if late and self._late and step.gives_up:
                step.gives_up(late[0])
            if not late or (self._late and step.gives_up):
                self._take(task, program, one.next[program])
                one.next[program] += 1
                if one.next[program] == len(steps):
                    one.resident.remove(program)
                    one.left -= 1
                    self._free[task.rank] += task.on_processors
                if not one.left:
                    return self._ended([one])
                return []
        return [] if placed else None

    def _place(self, one: _Running) -> bool:
        """Give a task's programs the free processors; return whether a program got one."""
        task = one.task
        before = one.placed
        while one.placed < len(task.programs) and (not task.on_processors or self._free[task.rank]):
            self._free[task.rank] -= task.on_processors
            one.resident.append(one.placed)
            one.placed += 1
        if before == 0 and one.placed and self._races:
            self._races.begin(task)
        return one.placed > before

    def _take(self, task: Task, program: int, number: int) -> None:
        self.steps, step = self.steps + 1, task.programs[program][number]
        if self._races:
            self._races.step(task, program, step)
        step.run()
        if self._races:
            self._races.raised(task, program, step.raises())

    def _meet(self, one: _Running) -> list[_Running]:
        """Move messages whose two ends have arrived; return tasks that have all of their messages."""
        task = one.task
        if one.arrived or len(one.resident) < task.needs_at_once:
            return []
        one.arrived, met = True, {task.number: one}
        if self._races:
            self._races.arrive(task)
        for end in task.ends:
            other = self._ends.pop((end.message, not end.sends), None)
            if other is None:
                self._ends[end.message, end.sends] = one, end
                continue
            sender, receiver = ((one, end), other) if end.sends else (other, (one, end))
            _move(*sender, *receiver)
            met[other[0].task.number] = other[0]
        found = [each for each in met.values() if each.moved == len(each.task.ends)]
        for each in found:
            self._finish(each)
        return self._ended(found)

    def _finish(self, one: _Running) -> None:
        """End a collective on its rank."""
        task = one.task
        if task.sums:
            _add_up(one)
        if self._races:
            self._races.meet(task, one.sources)
            for program, steps in enumerate(task.programs):
                for step in steps:
                    self._races.step(task, program, step)
        self._free[task.rank] += len(one.resident)
        one.left = 0

    def _ended(self, tasks: list[_Running]) -> list[_Running]:
        if self._races:
            for each in tasks:
                self._races.end(each.task)
        return tasks

    def _deadlock(self, stuck: list[_Running]) -> str:
        lines = [f"no rank can continue (seed {self.seed}):"]
        for one in sorted(stuck, key=lambda one: one.task.number)[:12]:
            task = one.task
            if not one.placed:
                why = "no processor is free"
            elif task.ends and not one.arrived:
                why = f"it has {len(one.resident)} of {task.needs_at_once} processors that it needs at once"
            elif task.ends:
                waiting = {end.peer for running, end in self._ends.values() if running is one}
                why = f"it waits for ranks {sorted(waiting)}"
            else:
                steps = [task.programs[program][one.next[program]] for program in one.resident]
                flags = [flag for step in steps for flag, word in step.awaits if _word(flag) != _word(word)]
                first = f", the first {self.program.place(flags[0])}" if flags else ""
                why = f"it waits for {len(flags)} flags{first}"
            lines.append(f"  {task}: {why}")
        busy = {one.task.rank for one in stuck}
        lines += [f"  rank {rank} has done all that it enqueued" for rank in self._ranks() - busy]
        return "\n".join(lines)

    def _ranks(self) -> set[int]:
        return set(range(self.program.ranks))


def _word(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def _move(source: _Running, sent: TransferEnd, to: _Running, expected: TransferEnd) -> None:
    if sent.what != expected.what:
        raise MachineError(
            f"ranks call different collectives: '{sent.what}' of rank {source.task.rank} meets "
            f"'{expected.what}' of rank {to.task.rank}"
        )
    source.moved += 1
    to.moved += 1
    to.sources.append(source.task)
    if sent.rows is None or expected.rows is None:
        return
    if sent.rows.numel() != expected.rows.numel():
        raise MachineError(
            f"ranks disagree on sizes: rank {source.task.rank} sends {sent.rows.numel()} numbers by "
            f"'{sent.what}', and rank {to.task.rank} expects {expected.rows.numel()}"
        )
    if to.task.sums:
        to.terms[source.task.rank] = sent.rows.clone()
    else:
        expected.rows.copy_(sent.rows.reshape(expected.rows.shape))


def _add_up(one: _Running) -> None:
    """Add up the rows from all ranks, in the order of ranks."""
    into = next(end.rows for end in one.task.ends if not end.sends)
    assert into is not None, "sums carry rows"
    first, *others = (one.terms[rank].view(into.shape) for rank in sorted(one.terms))
    into.copy_(first)
    for term in others:
        into.add_(term)


def require_waves_beside(program: Program) -> None:
    """Raise if a product and collectives that may be in flight together need too many processors.

    A communicator runs one kernel at a time, in a stream of its own; those of several run at once.
    """
    before = _all_before(program)
    collectives = [task for task in program.tasks if task.ends and task.ends[0].rows is not None]
    for product in program.tasks:
        if product.leaves is None:
            continue
        in_flight: dict[int, Task] = {}  # by stream, the one of most blocks
        for task in collectives:
            later = product.rank == task.rank and product.number > task.number
            most = in_flight.get(task.stream)
            if later and not before[product.number] >> task.number & 1:
                in_flight[task.stream] = max(filter(None, (most, task)), key=lambda one: one.needs_at_once)
        needed = sum(task.needs_at_once for task in in_flight.values())
        if product.leaves < needed:
            raise MachineError(
                f"{product} leaves {product.leaves} processors while "
                f"{' and '.join(map(str, in_flight.values()))} may be in flight, which need {needed}: "
                "one of them waits for the other"
            )


def require_channels_apart(program: Program) -> None:
    """Raise if two barriers of a rank may run at once on one channel: each may meet the other's peers."""
    before, last = _all_before(program), dict[Hashable, Task]()
    for task in program.tasks:
        if task.channel is None:
            continue
        one = last.get((task.rank, task.channel))
        if one is not None and not before[task.number] >> one.number & 1:
            raise MachineError(
                f"{task} and {one} may run at once on channel {task.channel}: use two channels"
            )
        last[task.rank, task.channel] = task


def _all_before(program: Program) -> list[int]:
    """Return for each task the tasks of its rank that have ended when it begins, as bits."""
    found: list[int] = []
    for task in program.tasks:
        bits = 0
        for number in task.after:
            bits |= found[number] | 1 << number
        found.append(bits)
    return found


def run_so_far(program: Program, seed: int = 0) -> None:
    """Run what has been enqueued until now; waits of kernels run out, as for a rank that never comes."""
    Execution(replace(program, tasks=[*program.tasks]), seed, races=False, gives_up=True).run()


RACES_EVERY = 4  # orders: finding races takes half of the time, and hardly depends on the order


@dataclass(frozen=True)
class Report:
    orders: int
    tasks: int
    steps: int  # of all orders


def search(
    program: Program,
    orders: int,
    expected: Sequence[Sequence[Tensor]] | None = None,
    first_seed: int = 0,
    *,
    waves: bool = False,
) -> Report:
    """Execute a program in `orders` orders, one for each seed; a MachineError has the seed of a failure.

    expected: results of each rank; by default those of the first order
    waves: also check that products leave processors to collectives that may be in flight
    """
    require_channels_apart(program)
    wanted = None if expected is None else [list(results) for results in expected]
    steps = 0
    for seed in range(first_seed, first_seed + orders):
        execution = Execution(program, seed, races=(seed - first_seed) % RACES_EVERY == 0)
        try:
            execution.run()
            if wanted is None:
                wanted = [[each.clone() for each in results] for results in program.results]
            _require_equal(program.results, wanted)
        except MachineError as error:
            raise MachineError(f"seed {seed}: {error}") from error
        steps += execution.steps
    if waves:
        require_waves_beside(program)
    return Report(orders, len(program.tasks), steps)


def _require_equal(found: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]) -> None:
    for rank, (results, expected) in enumerate(zip(found, wanted, strict=True)):
        for number, (result, value) in enumerate(zip(results, expected, strict=True)):
            if result.shape != value.shape:
                raise MachineError(
                    f"result {number} of rank {rank} is {tuple(result.shape)}, expected {tuple(value.shape)}"
                )
            if not torch.equal(result, value):
                wrong = int((result != value).sum())
                raise MachineError(
                    f"result {number} of rank {rank}: {wrong} of {value.numel()} numbers differ from expected"
                )
