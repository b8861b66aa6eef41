"""All that is known of an opcode, in one table: the pipe it takes, how long, what it means, what serves it.

What is in no row is an error that names it: nothing is skipped silently. An `Operation` is what the processor
needs of an instruction, worked out once before the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from tpkernels.gate.clock import arithmetic, control, memory, predicates
from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.operands import (
    Execute,
    Meaning,
    UnknownOperand,
    destination,
    following,
    is_predicate,
)
from tpkernels.gate.clock.resources import ATOMIC_LATENCY, GPU_FENCE, LOAD_LATENCY, SHARED, SYSTEM_FENCE


class OpcodeKind(IntEnum):
    """What is done beyond issue, pipe and scoreboard. PLAIN is by far the most frequent."""

    PLAIN = 0
    ACCESS = 1  # of shared memory
    PRODUCT = 2  # of a warp group
    PRODUCT_ALONE = 3  # of a warp
    AWAIT_PRODUCTS = 4
    COMMIT = 5  # copies since the last commit form a group
    AWAIT_GROUPS = 6  # of copies
    GLOBAL = 7  # its effect says what is moved
    FENCE = 8  # until the GPU, or the system, sees what was stored


class Row(NamedTuple):
    pipe: str  # of `PIPES`
    means: Callable[..., Meaning | None]  # of an instruction; None: its results are unknown
    latency: float = 12.0  # from issue to the release of the instruction's scoreboard
    kind: OpcodeKind = OpcodeKind.PLAIN


class UnknownInstruction(ValueError):
    """An instruction that the clock does not know, with its address and kernel."""


def meaning(one: Instruction, index_of: Mapping[int, int], kernel: str) -> Meaning:
    """index_of: the index of the instruction at each address."""
    try:
        means = TABLE[one.opcode].means
        found = means(one, index_of) if means in _BRANCHES else means(one)
        return Meaning(None, forgets=_results(one)) if found is None else found
    except (UnknownOperand, KeyError, IndexError, StopIteration) as error:
        raise UnknownInstruction(
            f"the clock does not know `{one}` of {kernel}: {type(error).__name__}: {error}"
        ) from error


def _nothing(one: Instruction) -> Meaning:
    """Order, caches, hints; what is stored into shared memory is unknown."""
    return Meaning(None)


def _unknown(one: Instruction) -> None:
    """Floating point, and what depends on data: its results are forgotten."""


def _results(one: Instruction) -> tuple[str, ...]:
    """The registers that a floating-point instruction writes."""
    found: list[str] = []
    for text in one.operands:
        if not is_predicate(text):
            break
        found.append(destination(text))
    if len(found) == len(one.operands) or "SETP" in one.opcode or one.opcode == "FCHK":
        return tuple(found)  # what follows is only read
    text = one.operands[len(found)]
    if not text.startswith(("R", "UR")):
        return tuple(found)
    return (*found, *following(destination(text), _count(one)))


def _count(one: Instruction) -> int:
    """Registers of the result."""
    if one.opcode.endswith("GMMA"):
        shape = next(name for name in one.modifiers if "x" in name)
        elements = int(shape.split("x")[1]) // 2  # 64 rows over 128 threads
        return elements if "F32" in one.modifiers or "S32" in one.modifiers else elements // 2
    if one.opcode in ("HMMA", "IMMA"):
        return 2 if one.modifiers[1:2] == ("F16",) else 4
    if one.opcode == "LDSM":
        return next((int(name) for name in reversed(one.modifiers) if name in ("2", "4")), 1)
    if one.opcode[0] == "D" or {"F64", "64", "U64", "S64"} & set(one.modifiers):
        return 2
    return 4 if "128" in one.modifiers else 1


# Cycles that a pipe of a scheduler takes no other instruction, by its lanes: white papers say 32 FP32, 16
# integer, 4 special. "": an instruction takes only an issue slot.
PIPES: Mapping[str, float] = {
    **{"": 0.0, "fma": 1.0, "alu": 2.0, "imad": 2.0},
    **{"xu": 8.0, "mio": 2.0, "uniform": 2.0, "fp64": 16.0},
}
_BRANCHES = (control.branch, control.back)
# Latencies from published micro-benchmarks of Volta to Hopper, rounded; 12 where nobody waits long. Those of
# loads and atomics are the machine's.
_ROWS: Mapping[str, Row] = {
    "FFMA FFMA32I FMUL FMUL32I FADD FADD32I FSWZADD": Row("fma", _unknown),
    "HFMA2_32I HADD2 HADD2_32I HMUL2 HMUL2_32I": Row("fma", _unknown),
    "HFMA2": Row("fma", arithmetic.half_constant),
    "FMNMX FSETP FSET FSEL F2FP F2IP I2IP I2FP FCHK": Row("alu", _unknown),
    "HMNMX2 HSET2 HSETP2 VABSDIFF VABSDIFF4": Row("alu", _unknown),
    "IADD IADD3 VIADD": Row("alu", arithmetic.add),
    "LEA": Row("alu", arithmetic.shift_add),
    "SHF": Row("alu", arithmetic.shift),
    "LOP3": Row("alu", arithmetic.logic),
    "PRMT": Row("alu", arithmetic.permute),
    "IMNMX VIMNMX VIMNMX3 VIADDMNMX": Row("alu", arithmetic.minimum_maximum),
    "IABS": Row("alu", arithmetic.absolute),
    "SGXT": Row("alu", arithmetic.extend),
    "BMSK": Row("alu", arithmetic.bit_mask),
    "MOV MOV32I": Row("alu", arithmetic.move),
    "CS2R": Row("alu", arithmetic.clear),
    "ISETP": Row("alu", predicates.compare),
    "PLOP3": Row("alu", predicates.logic),
    "SEL": Row("alu", predicates.select),
    "P2R": Row("alu", predicates.to_register),
    "R2P": Row("alu", predicates.from_register),
    "IMAD IMUL": Row("imad", arithmetic.multiply_add),
    "IDP IDP4A": Row("imad", _unknown),
    "F2F FRND": Row("xu", _unknown, 22.0),
    "MUFU": Row("xu", arithmetic.reciprocal, 22.0),
    "I2F": Row("xu", arithmetic.from_integer, 22.0),
    "F2I": Row("xu", arithmetic.to_integer, 22.0),
    "FLO": Row("xu", arithmetic.find_leading_one, 22.0),
    "POPC": Row("xu", arithmetic.count_ones, 22.0),
    "BREV": Row("xu", arithmetic.reverse_bits, 22.0),
    "LDS": Row("mio", _unknown, 29.0, OpcodeKind.ACCESS),
    "LDSM": Row("mio", _unknown, 33.0, OpcodeKind.ACCESS),
    "STS": Row("mio", _nothing, 18.0, OpcodeKind.ACCESS),
    "STSM": Row("mio", _nothing, 18.0, OpcodeKind.ACCESS),
    "ATOMS": Row("mio", _unknown, 60.0, OpcodeKind.ACCESS),
    "LDG LD": Row("mio", memory.global_load, kind=OpcodeKind.GLOBAL),
    "LDGSTS": Row("mio", memory.global_to_shared, kind=OpcodeKind.GLOBAL),
    "STG ST ATOM ATOMG": Row("mio", memory.global_store, kind=OpcodeKind.GLOBAL),
    "RED REDG": Row("mio", memory.global_store, 20.0, OpcodeKind.GLOBAL),
    "LDL": Row("mio", memory.local_load, 60.0),
    "STL": Row("mio", memory.local_store, 20.0),
    "SHFL": Row("mio", predicates.shuffle, 24.0),
    "REDUX": Row("mio", _unknown, 24.0),
    "MATCH MOVM": Row("mio", _unknown, 24.0),
    "VOTE": Row("mio", predicates.vote),
    "R2UR": Row("mio", arithmetic.first_lane),
    "S2R": Row("mio", predicates.special, 25.0),
    "VOTEU": Row("uniform", predicates.vote),
    "UP2UR": Row("uniform", predicates.to_register),
    "UR2UP": Row("uniform", predicates.from_register),
    "DADD DFMA DMUL DSETP": Row("fp64", _unknown, 48.0),
    "BRA CALL": Row("", control.branch),
    "RET": Row("", control.back),
    "EXIT": Row("", control.leave),
    "BSSY": Row("", control.begin_join),
    "BSYNC": Row("", control.join),
    "BAR": Row("", control.barrier),
    "SYNCS": Row("", control.mbarrier, 20.0),
    "ELECT": Row("", predicates.elect),
    "S2UR": Row("", predicates.special, 30.0),
    "LDC": Row("", memory.constant_load, 40.0),
    "HGMMA QGMMA IGMMA": Row("", _unknown, kind=OpcodeKind.PRODUCT),
    "HMMA IMMA": Row("", _unknown, 33.0, OpcodeKind.PRODUCT_ALONE),
    "WARPGROUP": Row("", _nothing, kind=OpcodeKind.AWAIT_PRODUCTS),
    "UTMALDG": Row("", memory.tensor_copy),
    "UTMASTG UTMAREDG": Row("", memory.tensor_put),
    "UTMACMDFLUSH LDGDEPBAR": Row("", _nothing, kind=OpcodeKind.COMMIT),
    "DEPBAR": Row("", _nothing, kind=OpcodeKind.AWAIT_GROUPS),
    "MEMBAR": Row("", _nothing, 30.0, OpcodeKind.FENCE),
    "FENCE CGAERRBAR": Row("", _nothing, 30.0),
    "ERRBAR": Row("", _nothing, 20.0),
    "B2R QSPC": Row("", _unknown),
    "BREAK BMOV WARPSYNC NANOSLEEP YIELD NOP PREEXIT ACQBULK": Row("", _nothing),
    "CCTL CCTLL CCTLT PMTRIG WARPGROUPSET UTMAPF UTMACCTL": Row("", _nothing),
}
# the same on the one value of all lanes
_UNIFORM = "UIADD3 UIMAD ULEA USHF ULOP3 UPRMT USGXT UBMSK UFLO UPOPC UBREV UMOV ULDC UISETP UPLOP3 USEL"
TABLE = {opcode: row for opcodes, row in _ROWS.items() for opcode in opcodes.split()}
TABLE |= {opcode: Row("uniform", TABLE[opcode[1:]].means) for opcode in _UNIFORM.split()}


class Operation:
    """Plain attributes, for the processor's loop reads them at each issue."""

    def __init__(self, instruction: Instruction, execute: Execute | None) -> None:
        """execute: None if its values decide nothing."""
        opcode, modifiers, operands = instruction.opcode, instruction.modifiers, instruction.operands
        row = TABLE[opcode]
        self.instruction, self.execute, self.opcode = instruction, execute, opcode
        self.latency = _LATENCIES.get(opcode, row.latency)
        self.kind = row.kind
        self.guard = instruction.guard
        self.stall = max(1, instruction.stall)
        self.writes, self.reads, self.waits = instruction.writes, instruction.reads, instruction.waits
        self.pipe, self.busy = list(PIPES).index(row.pipe), PIPES[row.pipe]
        self.shared = self.ideal = self.read = 0.0
        self.pending, self.closes = 0, False
        if self.kind == OpcodeKind.ACCESS:
            self.shared = _shared_bytes(opcode, modifiers) / SHARED
        elif self.kind == OpcodeKind.PRODUCT:
            self.closes = "gsb0" in operands
            self.ideal, self.read = _product(modifiers, operands)
        elif self.kind == OpcodeKind.FENCE:
            if "SYS" in modifiers:
                self.latency = SYSTEM_FENCE
            elif "GPU" in modifiers:
                self.latency = GPU_FENCE
            else:  # of the block, whose shared memory answers in order
                self.kind = OpcodeKind.PLAIN
        elif self.kind in (OpcodeKind.AWAIT_PRODUCTS, OpcodeKind.AWAIT_GROUPS):
            if "DEPBAR" in modifiers or (operands[:1] == ("SB0",) and len(operands) > 1):
                self.pending = int(operands[1], 0)
            else:
                self.kind = OpcodeKind.PLAIN


_LATENCIES = {"LDG": LOAD_LATENCY, "ATOM": ATOMIC_LATENCY, "ATOMG": ATOMIC_LATENCY}


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
