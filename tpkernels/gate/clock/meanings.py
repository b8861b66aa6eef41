"""Which instruction means what. What is in no list is an error that names it: nothing is skipped silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tpkernels.gate.clock import bits, control, floats, integers, memory, predicates, special
from tpkernels.gate.clock.instructions import Instruction
from tpkernels.gate.clock.operands import Meaning, UnknownOperand, destination, following, is_predicate

_NOTHING = frozenset(  # order, caches, hints; STSM stores tiles, whose content is unknown
    (
        *("NOP", "MEMBAR", "FENCE", "ERRBAR", "CCTL", "CCTLL", "CCTLT", "CGAERRBAR", "DEPBAR", "LDGDEPBAR"),
        *(
            "UTMACCTL",
            "UTMAPF",
            "UTMACMDFLUSH",
            "WARPGROUP",
            "WARPGROUPSET",
            "WARPSYNC",
            "NANOSLEEP",
            "YIELD",
        ),
        *("PMTRIG", "PREEXIT", "ACQBULK", "BMOV", "BREAK", "BPT", "STSM"),
    )
)
_UNKNOWN = frozenset(  # floating point, and what depends on data
    (
        *("FADD", "FMUL", "FFMA", "FADD32I", "FMUL32I", "FFMA32I", "FSEL", "FSETP", "FSET", "FMNMX", "FCHK"),
        *("FSWZADD", "MUFU", "FRND", "F2F", "F2FP", "F2I", "F2IP", "I2F", "I2FP", "I2IP", "HADD2", "HMUL2"),
        *(
            "HFMA2",
            "HADD2_32I",
            "HMUL2_32I",
            "HFMA2_32I",
            "HMNMX2",
            "HSETP2",
            "HSET2",
            "DADD",
            "DMUL",
            "DFMA",
        ),
        *(
            "DSETP",
            "DMNMX",
            "HMMA",
            "IMMA",
            "DMMA",
            "BMMA",
            "HGMMA",
            "IGMMA",
            "QGMMA",
            "BGMMA",
            "LDSM",
            "MOVM",
        ),
        *("QSPC", "MATCH", "B2R", "ATOMS", "IDP", "IDP4A", "VABSDIFF", "VABSDIFF4"),
    )
)
_PLAIN: Mapping[str, Callable[[Instruction], Meaning]] = {
    **dict.fromkeys(("IADD3", "IADD", "VIADD", "UIADD3", "UIADD"), integers.add),
    **dict.fromkeys(("IMAD", "UIMAD", "IMUL", "UIMUL"), integers.multiply_add),
    **dict.fromkeys(("LEA", "ULEA"), integers.shift_add),
    **dict.fromkeys(("SHF", "USHF"), integers.shift),
    **dict.fromkeys(("LOP3", "ULOP3"), integers.logic),
    **dict.fromkeys(("PRMT", "UPRMT"), bits.permute),
    **dict.fromkeys(
        ("VIMNMX", "VIMNMX3", "VIADDMNMX", "IMNMX", "UIMNMX", "UVIMNMX"), integers.minimum_maximum
    ),
    **dict.fromkeys(("IABS", "UIABS"), integers.absolute),
    **dict.fromkeys(("SGXT", "USGXT"), bits.extend),
    **dict.fromkeys(("BMSK", "UBMSK"), bits.bit_mask),
    **dict.fromkeys(("FLO", "UFLO"), bits.find_leading_one),
    **dict.fromkeys(("POPC", "UPOPC"), bits.count_ones),
    **dict.fromkeys(("BREV", "UBREV"), bits.reverse_bits),
    **dict.fromkeys(("MOV", "UMOV", "MOV32I"), integers.move),
    "CS2R": integers.clear,
    "R2UR": integers.first_lane,
    **dict.fromkeys(("ISETP", "UISETP"), predicates.compare),
    **dict.fromkeys(("PLOP3", "UPLOP3"), predicates.logic),
    **dict.fromkeys(("SEL", "USEL"), predicates.select),
    **dict.fromkeys(("VOTE", "VOTEU"), predicates.vote),
    **dict.fromkeys(("P2R", "UP2UR"), predicates.to_register),
    **dict.fromkeys(("R2P", "UR2UP"), predicates.from_register),
    "ELECT": predicates.elect,
    **dict.fromkeys(("S2R", "S2UR"), special.special),
    "SHFL": special.shuffle,
    "REDUX": special.reduction,
    **dict.fromkeys(("LDG", "LD"), memory.global_load),
    **dict.fromkeys(("STG", "ST", "RED", "REDG", "ATOMG", "ATOM"), memory.global_store),
    "LDGSTS": memory.global_to_shared,
    "LDS": memory.shared_load,
    "STS": memory.shared_store,
    "LDL": memory.local_load,
    "STL": memory.local_store,
    "UTMALDG": memory.tensor_copy,
    **dict.fromkeys(("UTMASTG", "UTMAREDG"), memory.tensor_put),
    "EXIT": control.leave,
    "BSSY": control.begin_join,
    "BSYNC": control.join,
    "BAR": control.barrier,
    "SYNCS": control.mbarrier,
    "USETMAXREG": control.set_registers,
}


class UnknownInstruction(ValueError):
    """An instruction that the clock does not know, with its address and kernel."""


def meaning(one: Instruction, index_of: Mapping[int, int], kernel: str) -> Meaning:
    """index_of: the index of the instruction at each address."""
    try:
        return _meaning(one, index_of)
    except (UnknownOperand, KeyError, IndexError, StopIteration) as error:
        raise UnknownInstruction(
            f"the clock does not know `{one}` of {kernel}: {type(error).__name__}: {error}"
        ) from error


def _meaning(one: Instruction, index_of: Mapping[int, int]) -> Meaning:
    opcode = one.opcode
    if opcode in _PLAIN:
        return _PLAIN[opcode](one)
    if opcode in ("BRA", "CALL"):
        return control.branch(one, index_of)
    if opcode in ("BRX", "BRXU", "RET"):
        return control.indexed_branch(one, index_of)
    if opcode in ("LDC", "ULDC"):
        fixed = re.fullmatch(r"c\[0x[0-9a-f]+\]\[0x[0-9a-f]+\]", one.operands[1])
        narrow = memory.size_of(one) not in (4, 8)
        return memory.constant_load(one) if narrow or not fixed else integers.move(one)
    if opcode == "MUFU" and one.modifiers == ("RCP",) and one.operands[1].startswith("R"):
        return floats.reciprocal(one)
    if opcode == "I2F" and "RP" in one.modifiers:
        return floats.from_integer(one)
    if opcode == "F2I" and "TRUNC" in one.modifiers and {"U32", "U64"} & set(one.modifiers):
        return floats.to_integer(one)
    if opcode == "HFMA2" and (constant := floats.half_constant(one)):
        return constant
    if opcode in _UNKNOWN:
        return Meaning(None, forgets=_results(one))
    if opcode in _NOTHING:
        return Meaning(None)
    raise KeyError(opcode)


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
    if one.opcode in ("HMMA", "IMMA", "DMMA", "BMMA"):
        return 2 if one.modifiers[1:2] == ("F16",) else 4
    if one.opcode == "LDSM":
        return next((int(name) for name in reversed(one.modifiers) if name in ("2", "4")), 1)
    if one.opcode[0] == "D" or {"F64", "64", "U64", "S64"} & set(one.modifiers):
        return 2
    return 4 if "128" in one.modifiers else 1
