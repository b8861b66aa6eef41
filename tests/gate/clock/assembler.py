"""A tiny assembler: programs of a few instructions with effects that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tpkernels.gate.clock import effects
from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.effects import Effect
from tpkernels.gate.clock.processor import Run, run
from tpkernels.gate.clock.table import Operation
from tpkernels.gate.clock.values import BlockValues, Constants, WarpState

Does = Callable[[WarpState], Effect | None] | Effect | None


@dataclass
class Assembly:
    """Each call appends an instruction; `loop` goes back so many times."""

    steps: list[Operation] = field(default_factory=list)

    def __call__(
        self, text: str, does: Does = None, *, stall=1, writes=None, reads=None, waits=(), warps=None
    ):
        """warps: that take part; None: all"""
        guard, text = text[1:].split(maxsplit=1) if text.startswith("@") else ("", text)
        name, _, operands = text.partition(" ")
        opcode, *modifiers = name.split(".")
        parts = tuple(part.strip() for part in operands.split(",") if part)
        one = Instruction(
            16 * len(self.steps), guard, opcode, tuple(modifiers), parts, stall, writes, reads, waits
        )
        self.steps.append(Operation(one, _execute(does, warps)))

    def loop(self, to: int, count: int) -> None:
        """What is from step `to` to here runs `count` times."""
        name = f"rounds to {to}"

        def again(state: WarpState) -> Effect | None:
            done = state.registers.get(name) or 0
            assert isinstance(done, int)
            state.registers[name] = (done + 1) % count
            return effects.Jump(to) if done + 1 < count else None

        self("BRA", again, stall=5)

    def end(self) -> None:
        self("EXIT", effects.Exit())


def _execute(does: Does, warps: Sequence[int] | None) -> Callable[[WarpState], Effect | None] | None:
    if does is None:
        return None

    def execute(state: WarpState) -> Effect | None:
        if warps is not None and state.warp not in warps:
            return None
        return does(state) if callable(does) else does

    return execute


@dataclass
class SmLaunch:
    warps: int = 1
    resident: int = 1
    boxes: Mapping[int, int] = field(default_factory=dict)
    programs: Sequence[tuple[int, int, int]] = ((0, 0, 0),)
    predicates: Mapping[str, bool | None] = field(default_factory=dict)

    def states(self, program: tuple[int, int, int]) -> list[WarpState]:
        block = BlockValues(program, Constants({}, frozenset()), dict(self.predicates))
        return [WarpState(warp, block) for warp in range(self.warps)]


def timed(program: Assembly, launch: SmLaunch | None = None, ends: bool = True, **options: int) -> Run:
    """ends: with an EXIT that the program need not write"""
    ended = Assembly([*program.steps])
    if ends:
        ended.end()
    return run(ended.steps, launch or SmLaunch(), **options)  # type: ignore[arg-type]


def ring(slots: int, steps: int, size: int = 20_000, products: int = 4) -> tuple[Assembly, SmLaunch]:
    """Warp 4 copies into a ring of slots, warps 0 to 3 multiply what is there and free the slot.

    A step's products take 128 cycles each; its copy `size / 40`, and 550 until it lands.
    """
    program = Assembly()
    full, empty = (lambda slot: 64 + 8 * slot), (lambda slot: 256 + 8 * slot)
    for slot in range(slots):
        program("SYNCS.EXCH.64", effects.InitMbarrier(full(slot), 1), warps=[4])
        program("SYNCS.EXCH.64", effects.InitMbarrier(empty(slot), 4), warps=[4])
    program("BAR.SYNC", effects.BarrierSync())
    program("BRA", lambda state: None if state.warp == 4 else effects.Jump(consume))
    for step in range(steps):
        slot, phase = step % slots, step // slots & 1
        program("SYNCS.PHASECHK", effects.AwaitPhase(empty(slot), 1 - phase), writes=0)
        program("SYNCS.ARRIVE", effects.Arrive(full(slot), 1, size), waits=(0,))
        program("UTMALDG.2D", effects.Copy(576, full(slot)))
    program.end()
    consume = len(program.steps)
    for step in range(steps):
        slot, phase = step % slots, step // slots & 1
        program("SYNCS.PHASECHK", effects.AwaitPhase(full(slot), phase), writes=0)
        for number in range(products):
            closes = ", gsb0" if number == products - 1 else ""
            program(
                f"HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24{closes}", waits=(0,) if number == 0 else ()
            )
        program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        program("SYNCS.ARRIVE.A1T0", effects.Arrive(empty(slot), 1, 0))
    program.end()
    return program, SmLaunch(warps=5, boxes={576: size})
