"""Compiled kernels on the clock's SM, with a note of what each of their warps does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.compiled import Assembly
from tests.gate.clock.assembler import Launch
from tests.gate.clock.examined import bytes_of
from tpkernels.gate.clock.cubin import Cubin, read
from tpkernels.gate.clock.effects import Effect, Exit, Jump
from tpkernels.gate.clock.operations import active
from tpkernels.gate.clock.processor import run
from tpkernels.gate.clock.semantics import Step, translate
from tpkernels.gate.clock.timeline import Run
from tpkernels.gate.clock.values import Argument, Block, Constants, WarpState, initial_values

COUNTED = {"HGMMA", "UTMALDG", "ATOMG"}  # opcodes


@dataclass
class Ran:
    effects: list[tuple[int, Effect]] = field(default_factory=list)  # with the warp
    by_warp: dict[int, Counter[str]] = field(default_factory=dict)  # how often each of COUNTED was executed
    timed: Run | None = None

    def of(self, kind: type) -> list:
        return [effect for _, effect in self.effects if isinstance(effect, kind)]

    @property
    def exits(self) -> set[int]:
        return {warp for warp, effect in self.effects if isinstance(effect, Exit)}

    def noting(self, step: Step) -> Callable[[WarpState], Effect | None] | None:
        one = step.instruction
        if step.execute is None and one.opcode not in COUNTED:
            return None

        def execute(state: WarpState) -> Effect | None:
            counts = self.by_warp.setdefault(state.warp, Counter())
            if one.opcode in COUNTED:
                counts[one.opcode] += not one.guard or active(one.guard, state.registers)
            effect = step.execute(state) if step.execute else None
            if effect is not None and not isinstance(effect, Jump):
                self.effects.append((state.warp, effect))
            return effect

        return execute


@dataclass
class CompiledLaunch(Launch):
    cubin: Cubin | None = None
    constants: Constants | None = None

    def states(self, program: tuple[int, int, int]) -> list[WarpState]:
        block = Block(program, self.constants, initial_values(self.cubin, self.constants))
        return [WarpState(warp, block) for warp in range(self.warps)]


@dataclass(frozen=True, slots=True)
class Kernel:
    cubin: Cubin
    program: list[Step]
    warps: int  # of a block
    types: Mapping[str, str]  # of run-time arguments
    boxes: Sequence[int]  # bytes that each descriptor moves at a time

    @staticmethod
    def of(assembly: Assembly, types: Mapping[str, str]) -> Kernel:
        cubin = read(assembly.cubin)
        boxes = [bytes_of(box) for box in assembly.boxes]
        return Kernel(cubin, translate(cubin), assembly.warps, types, boxes)

    def run(self, numbers: Mapping[str, int], *, blocks: int, block: int = 0) -> Ran:
        """numbers: of the integer arguments; pointers lie far apart, descriptors are unknown."""
        descriptors = [parameter.offset for parameter in self.cubin.parameters if parameter.size == 128]
        launch = CompiledLaunch(
            warps=self.warps,
            registers=self.cubin.registers,
            boxes=dict(zip(descriptors, self.boxes, strict=True)),
            programs=[(block, 0, 0)],
            cubin=self.cubin,
            constants=Constants.of(self.cubin, self.arguments(numbers), (blocks, 1, 1), 32 * self.warps),
        )
        ran = Ran()
        program = [replace(step, execute=ran.noting(step)) for step in self.program]
        ran.timed = run(program, launch, drawing=False)
        return ran

    def arguments(self, numbers: Mapping[str, int]) -> list[Argument]:
        given: list[Argument] = []
        for number, (name, kind) in enumerate(self.types.items()):
            if kind.startswith("tensordesc"):
                dimensions = kind[: kind.index("]")].count(",") + 1
                given += [None, *[1 << 12] * dimensions, *[1 << 12] * dimensions]
            elif kind.startswith("*"):
                given.append(0x7F00_0000_0000 + (number << 32))
            else:
                given.append(1e-5 if kind == "fp32" else numbers[name])
        return [*given, 0, 0]  # scratch memory, of which nothing is used
