"""Special registers, and values that lanes exchange."""

from __future__ import annotations

import numpy as np

from tpkernels.gate.clock.instructions import Instruction
from tpkernels.gate.clock.operands import Meaning, destination, is_predicate, source
from tpkernels.gate.clock.values import LANES, WORD, Value, WarpState


def special(one: Instruction) -> Meaning:
    """S2R, S2UR: blocks have one dimension of threads, clusters one block; clocks are unknown."""
    to, name = destination(one.operands[0]), one.operands[1]
    uniform = one.opcode == "S2UR"

    def run(state: WarpState) -> None:
        if name == "SR_TID.X":
            first = 32 * state.warp
            state.registers[to] = first if uniform else LANES + first
        elif name.startswith("SR_CTAID."):
            state.registers[to] = state.block.program["XYZ".index(name[-1])]
        elif name == "SR_LANEID":
            state.registers[to] = 0 if uniform else LANES
        elif name == "SR_WARPID":
            state.registers[to] = state.warp
        elif name in ("SR_TID.Y", "SR_TID.Z", "SR_CgaCtaId"):
            state.registers[to] = 0
        else:
            state.registers[to] = None

    return Meaning(run, (to,))


def shuffle(one: Instruction) -> Meaning:
    """SHFL.BFLY/.IDX/.UP/.DOWN p, d, a, by, clamp: what is the same in all lanes stays; others by .BFLY."""
    operands = one.operands[1:] if is_predicate(one.operands[0]) else one.operands
    forgets = (destination(one.operands[0]),) if is_predicate(one.operands[0]) else ()
    to, value, by = destination(operands[0]), source(operands[1]).name, source(operands[2]).name
    kind = one.modifiers[0]

    def run(state: WarpState) -> None:
        found, distance = state.registers[value], state.registers[by]
        if isinstance(found, np.ndarray):
            if kind == "BFLY" and isinstance(distance, int):
                found = found[LANES ^ distance & 31]
            elif kind == "IDX" and isinstance(distance, int):
                found = int(found[distance & 31])
            else:
                found = None
        state.registers[to] = found

    return Meaning(run, (to,), (value, by), forgets)


def reduction(one: Instruction) -> Meaning:
    """REDUX.SUM/.MIN/.MAX/.AND/.OR/.XOR d, a: over the active lanes."""
    to, value = destination(one.operands[0]), source(one.operands[1]).name
    kind = next((name for name in one.modifiers if name in ("SUM", "MIN", "MAX", "AND", "OR", "XOR")), "OR")
    flip = 0x80000000 if "S32" in one.modifiers and kind in ("MIN", "MAX") else 0

    def run(state: WarpState) -> None:
        found: Value = state.registers[value]
        if found is not None:
            lanes = np.broadcast_to(np.asarray(found, dtype=np.int64), (32,))
            lanes = (lanes if state.mask is None else lanes[state.mask]) ^ flip
            function = {
                "SUM": np.add,
                "MIN": np.minimum,
                "MAX": np.maximum,
                "AND": np.bitwise_and,
                "OR": np.bitwise_or,
                "XOR": np.bitwise_xor,
            }[kind]
            found = (int(function.reduce(lanes)) ^ flip) & WORD
        state.registers[to] = found

    return Meaning(run, (to,), (value,))
