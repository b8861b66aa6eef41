"""What the processor asks of an instruction, worked out once before the program runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np

from tpkernels.gate.clock.machine import Machine, timing
from tpkernels.gate.clock.semantics import Step
from tpkernels.gate.clock.values import Value

PIPES = ("", "fma", "alu", "imad", "xu", "mio", "uniform", "fp64")


class Kind(IntEnum):
    """What is done beyond issue, pipe and scoreboard. PLAIN is by far the most frequent."""

    PLAIN = 0
    ACCESS = 1  # of shared memory
    PRODUCT = 2  # of a warp group
    PRODUCT_ALONE = 3  # of a warp
    AWAIT_PRODUCTS = 4
    COMMIT = 5  # copies since the last commit form a group
    AWAIT_GROUPS = 6  # of copies
    GLOBAL = 7  # its effect says what is moved


class Operation:
    """Plain attributes, for the processor's loop reads them at each issue."""

    def __init__(self, step: Step, machine: Machine) -> None:
        instruction = step.instruction
        opcode, modifiers, operands = instruction.opcode, instruction.modifiers, instruction.operands
        pipe, self.busy, self.latency = timing(opcode)
        if opcode == "LDG":
            self.latency = machine.load_latency
        elif opcode in ("ATOM", "ATOMG"):
            self.latency = machine.atomic_latency
        self.step, self.execute, self.opcode = step, step.execute, opcode
        self.cause = f"scoreboard: {opcode}"
        self.guard = instruction.guard
        self.stall = max(1, instruction.stall)
        self.writes, self.reads, self.waits = instruction.writes, instruction.reads, instruction.waits
        self.pipe = PIPES.index(pipe)
        self.shared = self.ideal = self.read = 0.0
        self.pending, self.closes = 0, False
        self.kind = Kind.PLAIN
        if opcode in ("LDS", "STS", "LDSM", "STSM", "ATOMS"):
            self.kind, self.shared = Kind.ACCESS, _shared_bytes(opcode, modifiers) / machine.shared
        elif opcode in ("HGMMA", "QGMMA", "IGMMA"):
            self.kind, self.closes = Kind.PRODUCT, "gsb0" in operands
            self.ideal, self.read = _product(modifiers, operands)
        elif opcode in ("HMMA", "IMMA"):
            self.kind = Kind.PRODUCT_ALONE
        elif opcode == "WARPGROUP" and "DEPBAR" in modifiers:
            self.kind, self.pending = Kind.AWAIT_PRODUCTS, int(operands[1], 0)
        elif opcode in ("UTMACMDFLUSH", "LDGDEPBAR"):
            self.kind = Kind.COMMIT
        elif opcode == "DEPBAR" and len(operands) > 1 and operands[0] == "SB0":
            self.kind, self.pending = Kind.AWAIT_GROUPS, int(operands[1], 0)
        elif opcode in ("LDG", "STG", "LD", "ST", "LDGSTS", "RED", "REDG", "ATOM", "ATOMG"):
            self.kind = Kind.GLOBAL


def operations(program: Sequence[Step], machine: Machine) -> list[Operation]:
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
