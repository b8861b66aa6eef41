"""Compiled kernels, translated to be run without time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.compiled import Assembly
from tests.gate.clock.functional import Ran, run_block
from tpkernels.gate.clock.cubin import Cubin, read
from tpkernels.gate.clock.semantics import Step, translate
from tpkernels.gate.clock.values import Argument


@dataclass(frozen=True, slots=True)
class Kernel:
    cubin: Cubin
    program: list[Step]
    warps: int  # of a block
    types: Mapping[str, str]  # of run-time arguments

    @staticmethod
    def of(assembly: Assembly, types: Mapping[str, str]) -> Kernel:
        cubin = read(assembly.cubin)
        return Kernel(cubin, translate(cubin), assembly.warps, types)

    def run(self, numbers: Mapping[str, int], *, blocks: int, block: int = 0) -> Ran:
        """numbers: of the integer arguments; pointers lie far apart, descriptors are unknown."""
        arguments = self.arguments(numbers)
        return run_block(
            self.cubin,
            arguments,
            grid=(blocks, 1, 1),
            block=(block, 0, 0),
            warps=self.warps,
            program=self.program,
        )

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
