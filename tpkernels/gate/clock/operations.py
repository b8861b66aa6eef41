"""What the processor asks of an instruction, worked out once before the program runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tpkernels.gate.clock.rates import SmRates
from tpkernels.gate.clock.semantics import DecodedStep
from tpkernels.gate.clock.table import PIPES, TABLE, OpcodeKind
from tpkernels.gate.clock.values import Value


class Operation:
    """Plain attributes, for the processor's loop reads them at each issue."""

    def __init__(self, step: DecodedStep, machine: SmRates) -> None:
        instruction = step.instruction
        opcode, modifiers, operands = instruction.opcode, instruction.modifiers, instruction.operands
        row = TABLE[opcode]
        self.latency, self.kind = row.latency, row.kind
        if opcode == "LDG":
            self.latency = machine.load_latency
        elif opcode in ("ATOM", "ATOMG"):
            self.latency = machine.atomic_latency
        self.step, self.execute, self.opcode = step, step.execute, opcode
        self.guard = instruction.guard
        self.stall = max(1, instruction.stall)
        self.writes, self.reads, self.waits = instruction.writes, instruction.reads, instruction.waits
        self.pipe, self.busy = list(PIPES).index(row.pipe), PIPES[row.pipe]
        self.shared = self.ideal = self.read = 0.0
        self.pending, self.closes = 0, False
        if self.kind == OpcodeKind.ACCESS:
            self.shared = _shared_bytes(opcode, modifiers) / machine.shared
        elif self.kind == OpcodeKind.PRODUCT:
            self.closes = "gsb0" in operands
            self.ideal, self.read = _product(modifiers, operands)
        elif self.kind == OpcodeKind.FENCE:
            if "SYS" in modifiers:
                self.latency = machine.system_fence
            elif "GPU" in modifiers:
                self.latency = machine.gpu_fence
            else:  # of the block, whose shared memory answers in order
                self.kind = OpcodeKind.PLAIN
        elif self.kind in (OpcodeKind.AWAIT_PRODUCTS, OpcodeKind.AWAIT_GROUPS):
            if "DEPBAR" in modifiers or (operands[:1] == ("SB0",) and len(operands) > 1):
                self.pending = int(operands[1], 0)
            else:
                self.kind = OpcodeKind.PLAIN


def operations(program: Sequence[DecodedStep], machine: SmRates) -> list[Operation]:
    return [Operation(step, machine) for step in program]


def active(guard: str, registers: Mapping[str, Value]) -> bool:
    """Does any lane take part? A guard of unknown value counts as true."""
    negated = guard[0] == "!"
    value = registers[guard[1:] if negated else guard]
    if value is None:
        return True
    if isinstance(value, np.ndarray):
        return not value.all() if negated else bool(value.any())
    return value is not negated


def _shared_bytes(opcode: str, modifiers: tuple[str, ...]) -> int:
    """That a warp's access moves, without conflicts between banks."""
    if opcode in ("LDSM", "STSM"):  # matrices of 8 rows of 16 bytes
        return 128 * (int(modifiers[-1]) if modifiers and modifiers[-1] in ("2", "4") else 1)
    for name, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if name in modifiers:
            return 32 * size
    return 32 * 4


def _product(modifiers: tuple[str, ...], operands: tuple[str, ...]) -> tuple[float, float]:
    """(cycles at full speed, bytes read from shared memory) of a product of a warp group.

    Its depth is 32 bytes in each type: 16 of bf16, 32 of fp8, 8 of tf32.
    """
    rows, cols, _ = (int(size) for size in modifiers[0].split("x"))
    from_registers = operands[1].startswith("R")
    return cols / 2, cols * 32 + (0 if from_registers else rows * 32)
