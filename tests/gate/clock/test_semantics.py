"""What single instructions compute: against Python's integers, for plain ints and for lanes alike."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

from tpkernels.gate.clock.cubin import Cubin, Instruction
from tpkernels.gate.clock.effects import Arrive, Copy
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.table import UnknownInstruction, meaning
from tpkernels.gate.clock.values import BlockValues, Constants, WarpState, initial_values

M = 2**32 - 1


def instruction(text: str, address: int = 0) -> Instruction:
    guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    name, _, operands = rest.partition(" ")
    opcode, *modifiers = name.split(".")
    parts = tuple(part.strip() for part in operands.split(", ")) if operands else ()
    return Instruction(address, guard[1:], opcode, tuple(modifiers), parts, 1, None, None, ())


def warp(*texts: str, **registers: object) -> tuple[list, WarpState]:
    """The program, all of whose registers are wanted, and a warp in front of it."""
    code = tuple(instruction(text, 16 * number) for number, text in enumerate((*texts, "EXIT")))
    cubin = Cubin("kernel", code, 255, (), 0x210, {})
    constants = Constants({0: bytes(0x210)}, frozenset())
    state = WarpState(0, BlockValues((0, 0, 0), constants, initial_values(cubin, constants)))
    state.registers.update(registers)
    return translate(cubin, wanted=state.registers), state


def execute(*texts: str, **registers: object) -> dict:
    program, state = warp(*texts, **registers)
    for step in program[:-1]:
        if step.execute:
            step.execute(state)
    return state.registers


def s(value: int) -> int:
    return (value & M ^ 1 << 31) - (1 << 31)


def wide(low: int, high: int) -> int:
    return low | high << 32


# text, and what R0 (and for pairs R1) becomes of a = R4, b = R5, c = R6, d = R7, p = P1
CASES = {
    "IADD3 R0, R4, R5, R6": lambda a, b, c, d, p: a + b + c,
    "IADD3 R0, R4, -R5, RZ": lambda a, b, c, d, p: a - b,
    "IADD3 R0, -R4, R5, -R6": lambda a, b, c, d, p: b - a - c,
    "IADD3.X R0, R4, ~R5, RZ, P1, !PT": lambda a, b, c, d, p: a + (b ^ M) + p,
    "VIADD R0, R4, 0xffffffe": lambda a, b, c, d, p: a + 0xFFFFFFE,
    "IMAD R0, R4, -0x18, R6": lambda a, b, c, d, p: a * -0x18 + c,
    "IMAD R0, R4, R5, -R6": lambda a, b, c, d, p: a * b - c,
    "IMAD.MOV R0, RZ, RZ, -R6": lambda a, b, c, d, p: -c,
    "IMAD.SHL.U32 R0, R4, 0x80, RZ": lambda a, b, c, d, p: a * 0x80,
    "IMAD.X R0, R4, 0x1, R5, P1": lambda a, b, c, d, p: a + b + p,
    "IMAD.HI.U32 R0, R4, R5, R6": lambda a, b, c, d, p: a * b + wide(c, d) >> 32,
    "IMAD.HI R0, R4, R5, RZ": lambda a, b, c, d, p: s(a) * s(b) >> 32,
    "IABS R0, R4": lambda a, b, c, d, p: abs(s(a)),
    "LEA R0, R4, R5, 0x3": lambda a, b, c, d, p: (a << 3) + b,
    "LEA.HI R0, R4, R5, RZ, 0x7": lambda a, b, c, d, p: (a >> 25) + b,
    "LEA.HI.X R0, R4, R5, R6, 0x2, P1": lambda a, b, c, d, p: (wide(a, c) << 2 >> 32) + b + p,
    "LEA.HI.X.SX32 R0, R4, R5, 0x1, P1": lambda a, b, c, d, p: (s(a) << 1 >> 32) + b + p,
    "LEA.HI.SX32 R0, R4, 0x1, 0x1a": lambda a, b, c, d, p: (s(a) << 26 >> 32) + 1,
    "SHF.L.U32 R0, R4, 0x5, RZ": lambda a, b, c, d, p: a << 5,
    "SHF.L.U64.HI R0, R4, 0x1, R6": lambda a, b, c, d, p: wide(a, c) << 1 >> 32,
    "SHF.R.U32.HI R0, RZ, 0x1c, R4": lambda a, b, c, d, p: a >> 28,
    "SHF.R.S32.HI R0, RZ, 0x1f, R4": lambda a, b, c, d, p: s(a) >> 31,
    "SHF.R.U64 R0, R4, 0x9, R6": lambda a, b, c, d, p: wide(a, c) >> 9,
    "SHF.R.U32.HI R0, RZ, R5, R4": lambda a, b, c, d, p: a >> min(b, 32),
    "SHF.L.W.U32.HI R0, R4, 0x9, R4": lambda a, b, c, d, p: a << 9 | a >> 23,
    "LOP3.LUT R0, R4, R5, RZ, 0xc0, !PT": lambda a, b, c, d, p: a & b,
    "LOP3.LUT R0, RZ, R5, RZ, 0x33, !PT": lambda a, b, c, d, p: ~b,
    "LOP3.LUT R0, R4, R5, R6, 0x78, !PT": lambda a, b, c, d, p: a ^ b & c,
    "LOP3.LUT R0, R4, R5, R6, 0xf8, !PT": lambda a, b, c, d, p: a | b & c,
    "LOP3.LUT R0, R4, R5, R6, 0xca, !PT": lambda a, b, c, d, p: a & b | ~a & c,
    "LOP3.LUT R0, R4, 0x1, RZ, 0xc, !PT": lambda a, b, c, d, p: ~a & 1,
    "PRMT R0, R4, 0x5432, R6": lambda a, b, c, d, p: wide(a, c) >> 16,
    "PRMT R0, R4, 0x3210, R6": lambda a, b, c, d, p: a,
    "PRMT R0, R4, 0x8880, RZ": lambda a, b, c, d, p: a & 0xFF | (0xFFFFFF00 if a & 0x80 else 0),
    "VIMNMX R0, R4, R5, PT": lambda a, b, c, d, p: min(s(a), s(b)),
    "VIMNMX.U32 R0, R4, R5, !PT": lambda a, b, c, d, p: max(a, b),
    "VIMNMX3 R0, R4, R5, R6, PT": lambda a, b, c, d, p: min(s(a), s(b), s(c)),
    "VIMNMX3.U32 R0, R4, R5, R6, !PT": lambda a, b, c, d, p: max(a, b, c),
    "VIADDMNMX R0, R4, 0x10, R6, PT": lambda a, b, c, d, p: min(s(a + 16), s(c)),
    "SEL R0, R4, R5, P1": lambda a, b, c, d, p: a if p else b,
    "SGXT R0, R4, 0x5": lambda a, b, c, d, p: (a & 31) - 32 * (a >> 4 & 1),
    "SGXT.U32 R0, R4, 0x5": lambda a, b, c, d, p: a & 31,
    "BMSK R0, 0x3, 0x4": lambda a, b, c, d, p: 0x78,
    "FLO.U32 R0, R4": lambda a, b, c, d, p: a.bit_length() - 1,
    "POPC R0, R4": lambda a, b, c, d, p: a.bit_count(),
    "P2R R0, PR, R4, 0x2": lambda a, b, c, d, p: a & ~2 | p << 1,
}
PAIRS = {
    "IMAD.WIDE.U32 R0, R4, R5, R6": lambda a, b, c, d, p: a * b + wide(c, d),
    "IMAD.WIDE R0, R4, R5, R6": lambda a, b, c, d, p: s(a) * s(b) + wide(c, d),
    "IMAD.WIDE R0, R4, 0x55555556, RZ": lambda a, b, c, d, p: s(a) * 0x55555556,
    "UIADD3.64 R0, R4, -R6, RZ": lambda a, b, c, d, p: wide(a, b) - wide(c, d),
}
PREDICATES = {
    "ISETP.LT.AND P0, PT, R4, R5, P1": lambda a, b, c, d, p: s(a) < s(b) and p,
    "ISETP.GE.U32.AND P0, PT, R4, R5, PT": lambda a, b, c, d, p: a >= b,
    "ISETP.GT.OR P0, PT, R4, -0x1, !P1": lambda a, b, c, d, p: s(a) > -1 or not p,
    "ISETP.NE.U32.XOR P0, PT, R4, R5, P1": lambda a, b, c, d, p: (a != b) ^ p,
    "ISETP.NE.U32.AND.EX P0, PT, R4, R5, PT, P1": lambda a, b, c, d, p: a != b or p,
    "ISETP.LT.AND.EX P0, PT, R4, R5, PT, P1": lambda a, b, c, d, p: s(a) < s(b) or (a == b and p),
    "PLOP3.LUT P0, PT, PT, PT, P1, 0x80, 0x0": lambda a, b, c, d, p: p,
    "PLOP3.LUT P0, PT, P1, PT, PT, 0xf, 0x0": lambda a, b, c, d, p: not p,
    "LOP3.LUT P0, RZ, R4, 0x1f, RZ, 0xc0, !PT": lambda a, b, c, d, p: bool(a & 31),
    "IADD3 R0, P0, R4, R5, RZ": lambda a, b, c, d, p: a + b > M,
    "IADD3 R0, P0, R4, -R5, RZ": lambda a, b, c, d, p: a >= b,
    "LEA R0, P0, R4, R5, 0x1": lambda a, b, c, d, p: (2 * a & M) + b > M,
}


def samples() -> list[tuple[int, int, int, int, bool]]:
    dice = random.Random(0)
    few = [0, 1, 31, 32, 0x7FFFFFFF, 0x80000000, M]
    pick = [few, few, [dice.getrandbits(32) for _ in range(50)]]
    return [
        (*(dice.choice(dice.choice(pick)) for _ in range(4)), dice.random() < 0.5)  # type: ignore[misc]
        for _ in range(64)
    ]


def both(text: str, names: tuple[str, ...]) -> tuple[list, list]:
    """The results for samples one at a time, and 32 in the lanes of a warp."""
    single = [
        [execute(text, R4=a, R5=b, R6=c, R7=d, P1=p)[name] for name in names] for a, b, c, d, p in samples()
    ]
    lanes = []
    for half in (samples()[:32], samples()[32:]):
        numbers = [np.array(column, dtype=np.int64) for column in list(zip(*half, strict=True))[:4]]
        holds = np.array([one[4] for one in half])
        found = execute(text, R4=numbers[0], R5=numbers[1], R6=numbers[2], R7=numbers[3], P1=holds)
        columns = [np.broadcast_to(np.asarray(found[name]), (32,)).tolist() for name in names]
        lanes += [list(row) for row in zip(*columns, strict=True)]
    return single, lanes


@pytest.mark.parametrize("text", [*CASES, *PAIRS, *PREDICATES])
def test_instruction_computes(text: str):
    expected = [(CASES | PAIRS | PREDICATES)[text](*sample) for sample in samples()]
    if text in PREDICATES:
        names, expected = ("P0",), [[bool(holds)] for holds in expected]
    elif text in PAIRS:
        names, expected = ("R0", "R1"), [[number & M, number >> 32 & M] for number in expected]
    else:
        names, expected = ("R0",), [[number & M] for number in expected]
    assert both(text, names) == (expected, expected)


def test_logic_is_what_its_table_says_of_each_bit():
    def of(table: int) -> object:
        return execute(f"LOP3.LUT R0, R4, R5, R6, {table:#x}, !PT", R4=0xF0, R5=0xCC, R6=0xAA)["R0"] & 0xFF

    assert [of(table) for table in range(256)] == [*range(256)]


@pytest.mark.parametrize("text", [*CASES, *PREDICATES])
def test_unknown_operand_makes_unknown_result_or_none_at_all(text: str):
    found = execute(text, R4=None, R5=None, R6=None, P1=None)
    assert found["P0" if text in PREDICATES else "R0"] in (None, 0x78)  # a mask of immediates stays known


def test_unknown_predicate_and_false_is_false():
    registers = {"R4": None, "R5": 1, "P1": False}
    assert execute("ISETP.LT.AND P0, PT, R4, R5, P1", **registers)["P0"] is False
    assert execute("ISETP.LT.OR P0, PT, R4, R5, !P1", **registers)["P0"] is True
    assert execute("PLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x0", P1=False, P2=None)["P0"] is False


def test_guard_of_some_lanes_leaves_the_others():
    some = np.arange(32) < 3
    found = execute("@P1 MOV R0, 0x7", R0=1, P1=some)["R0"]
    assert found.tolist() == [7] * 3 + [1] * 29
    assert execute("@!P1 MOV R0, 0x7", R0=1, P1=True)["R0"] == 1


def test_uniform_registers_take_the_value_of_the_first_active_lane():
    lanes = np.arange(32) + 5
    assert execute("R2UR UR0, R4", R4=lanes)["UR0"] == 5
    assert execute("@P1 R2UR UR0, R4", R4=lanes, P1=np.arange(32) == 9)["UR0"] == 14


COMPARISONS = (
    "FSETP.GEU.AND P4, PT, R27, RZ, PT",
    "HSETP2.BF16_V2.GEU.AND P4, PT, R27.H1_H1, RZ.H0_H0, PT",
    "FCHK P4, R27, R3",
)


@pytest.mark.parametrize("text", COMPARISONS)
def test_comparison_of_floats_forgets_its_predicate_and_keeps_its_operands(text: str):
    found = execute(text, P4=True, R27=5)
    assert (found["P4"], found["R27"]) == (None, 5)


def test_half_precision_constant_is_a_move():
    assert execute("HFMA2.MMA R0, -RZ, RZ, 1.875, 0")["R0"] == 0x3F800000
    assert execute("HFMA2.MMA R0, -RZ, RZ, 0, 5.9604644775390625e-08")["R0"] == 1


def test_lanes_that_part_meet_again():
    program, state = warp(
        "BSSY B0, 0x50", "@P1 BRA 0x40", "MOV R0, 0x1", "BRA 0x50", "MOV R0, 0x2", "BSYNC B0", "MOV R2, 0x3",
        R0=0, P1=np.arange(32) < 4,
    )  # fmt: skip
    order = run(program, state)
    assert order == [0, 1, 2, 3, 5, 4, 5, 6, 7]
    assert state.registers["R0"].tolist() == [2] * 4 + [1] * 28  # type: ignore[union-attr]
    assert state.registers["R2"] == 3
    assert state.active is None


def test_lanes_that_exit_leave_the_others_alone():
    program, state = warp("@P1 EXIT", "MOV R0, 0x1", R0=0, P1=np.arange(32) < 4)
    assert run(program, state) == [0, 1, 2]
    assert state.registers["R0"].tolist() == [0] * 4 + [1] * 28  # type: ignore[union-attr]


def test_branch_on_data_is_counted_and_leaves_a_loop():
    program, state = warp("LDG.E R4, [R2.64]", "ISETP.NE.AND P0, PT, R4, RZ, PT", "@P0 BRA 0x0")
    assert run(program, state) == [0, 1, 2, 3]
    assert state.guessed == 1


def test_branch_on_data_goes_past_a_call():
    program, state = warp(
        "LDG.E R4, [R2.64]", "ISETP.NE.AND P0, PT, R4, RZ, PT", "@P0 BRA 0x50", "MOV R6, 0x50", "CALL 0x60",
        "EXIT", "RET.REL.NODEC R6 0x0",
    )  # fmt: skip
    assert run(program, state) == [0, 1, 2, 5]


def run(program: list, state: WarpState) -> list[int]:
    order = []
    for _ in range(100):
        order.append(state.at)
        step = program[state.at]
        state.at += 1
        effect = step.execute(state) if step.execute else None
        if type(effect).__name__ == "Exit":
            return order
        if type(effect).__name__ == "Jump":
            state.at = effect.index
    raise AssertionError(order)


def test_words_pass_through_spills_and_are_unknown_in_shared_memory():
    assert execute("STS [R4], R5", "LDS R0, [R4]", R0=1, R4=64, R5=7)["R0"] is None
    lanes = np.arange(32)
    assert execute("STL [R1+0x8], R5", "LDL R0, [R1+0x8]", R1=256, R5=lanes)["R0"] is lanes


def test_an_unknown_opcode_or_operand_is_named_with_its_place():
    with pytest.raises(UnknownInstruction, match=r"0x0010 FROB.U32 R1, R2` of kernel"):
        warp("NOP", "FROB.U32 R1, R2")
    with pytest.raises(UnknownInstruction, match=r"IADD3 R0, R4, R5.H7, RZ"):
        meaning(instruction("IADD3 R0, R4, R5.H7, RZ"), {}, "kernel")


def test_sectors_are_those_that_the_active_lanes_touch():
    lanes = SimpleNamespace(row=np.arange(32) * 16, column=np.arange(32) * 4096, same=0)
    found = {}
    for name, offsets in vars(lanes).items():
        program, state = warp("@P1 LDG.E.128 R8, desc[UR4][R2.64+0x20]", R2=offsets, R3=1, P1=True)
        effect = program[0].execute(state)
        found[name] = effect.bytes, effect.sectors
    assert found == {"row": (512, 16), "column": (512, 32), "same": (512, 1)}
    program, state = warp("@P1 LDG.E.128 R8, desc[UR4][R2.64]", R2=lanes.row, R3=1, P1=np.arange(32) < 3)
    effect = program[0].execute(state)
    assert (effect.bytes, effect.sectors) == (48, 2)


def test_predicates_are_kept_as_bits_of_an_unknown_register():
    registers = execute(
        "LOP3.LUT R9, R9, 0xffffdfff, RZ, 0xc0, !PT",
        "@P1 LOP3.LUT R9, R9, 0x2000, RZ, 0xfc, !PT",
        "LOP3.LUT P2, RZ, R9, 0x2000, RZ, 0xc0, !PT",
        P1=True,
    )
    assert registers["P2"] is True


@pytest.mark.parametrize(
    "text",
    [
        "UTMALDG.2D.MULTICAST [UR8], [UR6], UR12",
        "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR8], RZ",
        "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR8], RZ",
        "UCGABAR_ARV",
        "USETMAXREG.DEALLOC 0x18",
        "BAR.ARV 0x1, 0x100",
        "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80",
    ],
)
def test_clusters_and_roles_of_warps_are_not_known(text: str):
    with pytest.raises(UnknownInstruction, match=f"the clock does not know `0x0000 {re.escape(text)}`"):
        warp(text)


def test_copies_name_their_mbarrier_and_arrivals_count_lanes_and_bytes():
    program, state = warp("UTMALDG.2D [UR8], [UR6]", UR6=0, UR7=0x7000, UR9=576)
    assert program[0].execute(state) == Copy(0, 576)
    arrival = "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR8], R4"
    for lanes, there in ((1, np.arange(32) == 5), (32, True)):
        program, state = warp(arrival, UR8=4096, R4=16384, P0=there)
        assert program[0].execute(state) == Arrive(4096, lanes, lanes * 16384)
