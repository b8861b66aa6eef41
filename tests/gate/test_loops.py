"""What is read of loops in machine code, on instructions taken from compiled kernels."""

import pytest

from tpkernels.gate import loops

# opcode and operands -> the second half of its encoding, with the scoreboards that it sets and waits for
LOAD = ("LDG.E.128 R12, desc[UR10][R46.64]", 0x0000A4000C1E1D00)  # sets the third scoreboard
OTHER_LOAD = ("LDG.E.128 R16, desc[UR10][R46.64]", 0x0000E4000C1E1D00)  # sets the fourth
USE = ("PRMT R52, R12.reuse, 0x7632, R52", 0x004FE20000000034)  # waits for the third
OTHER_USE = ("PRMT R53, R16.reuse, 0x7632, R53", 0x008FE20000000034)  # waits for the fourth
ADD = ("FADD R38, R53, R38", 0x000FE20000000000)
PRODUCT = ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR36], R24, gsb0", 0x000FE20000000000)
STORE = ("STG.E.64 desc[UR10][R2.64], R4", 0x000FE20000000000)


def jump(to: int, predicate: str = "@!P0 ") -> tuple[str, int]:
    return f"{predicate}BRA 0x{16 * to:x}", 0x000FEA0003800000


def listing(*code: tuple[str, int]) -> str:
    return "".join(
        f"        /*{16 * number:04x}*/                   {text} ;      /* 0x{number:016x} */\n"
        f"                                                         /* 0x{control:016x} */\n"
        for number, (text, control) in enumerate(code)
    )


ONE_LOOP = (ADD, LOAD, USE, OTHER_LOAD, OTHER_USE, ADD, jump(1))
CODE = {
    "one_by_one": (ONE_LOOP, (1, {"all": 6, "loads": 2, "load waits": 2, "work": 32}, 16, 2)),
    "together": (
        (ADD, LOAD, OTHER_LOAD, USE, OTHER_USE, ADD, jump(1)),
        (1, {"all": 6, "loads": 2, "load waits": 1, "work": 32}, 32, 1),
    ),
    "a_turn_ahead": (
        (LOAD, USE, LOAD, ADD, jump(1)),
        (1, {"all": 4, "loads": 1, "load waits": 1, "work": 16}, 16, 1),
    ),
    "no_loop": (
        (LOAD, USE, ADD, jump(3, "")),
        (0, {"all": 4, "loads": 1, "load waits": 1, "work": 16}, 16, 1),
    ),
    "innermost": ((ADD, LOAD, ADD, jump(2), USE, jump(1)), (1, {"all": 2, "floats": 1}, 16, 1)),
    "waiting_is_no_loop": (
        (LOAD, USE, ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R7", 0), jump(2), ADD, jump(0)),
        (1, {"all": 6, "loads": 1, "load waits": 1, "work": 16}, 16, 1),
    ),
    "a_branch_is_left_out": (
        (PRODUCT, jump(5), LOAD, USE, STORE, ADD, jump(0)),
        (1, {"all": 4, "products": 1, "floats": 1, "work": 64 * 256 * 16}, 16, 1),
    ),
    "a_product_in_a_branch_is_not": (
        (ADD, jump(3), PRODUCT, ADD, jump(0)),
        (1, {"all": 5, "products": 1, "floats": 2, "work": 64 * 256 * 16}, 0, 0),
    ),
    "a_loop_without_products_beside": (
        (LOAD, USE, ADD, jump(0), PRODUCT, jump(4)),
        (1, {"all": 2, "products": 1, "work": 64 * 256 * 16}, 16, 1),
    ),
}


@pytest.mark.parametrize("name", CODE)
def test_a_turn_of_the_innermost_loop_is_counted(name):
    code, (count, mix, load_bytes, load_waits) = CODE[name]
    found = loops.nvidia_loops(listing(*code))
    assert found.loops == count
    assert {kind: found.mix.get(kind, 0) for kind in mix} == mix
    assert (found.load_bytes, found.load_waits) == (load_bytes, load_waits)


OUTSIDE = {
    "after_the_loop": ((PRODUCT, jump(0), ADD, STORE, STORE), ({"floats": 1, "stores": 2}, 0)),
    "in_a_branch_of_the_loop": (
        (PRODUCT, jump(4), ADD, STORE, ADD, jump(0)),
        ({"floats": 1, "stores": 1}, 1),
    ),
    "in_a_loop_around": ((ADD, PRODUCT, jump(1), STORE, jump(0)), ({"floats": 1, "stores": 1}, 2)),
    "nowhere": ((LOAD, USE, STORE, jump(0)), ({}, 0)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_lies_outside_the_turn_is_counted_and_where_it_stores(name):
    code, told = OUTSIDE[name]
    found = loops.nvidia_loops(listing(*code))
    assert (found.rest, found.tile_loops) == told


KINDS = {
    "LDGSTS.E.BYPASS.128": ("copies", 16),
    "LDG.E.U16": ("loads", 2),
    "LDGDEPBAR": ("others", 4),
    "STG.E.ENL2.256": ("stores", 32),
    "LDSM.16.M88.4": ("shared loads", 4),
    "BAR.SYNC.DEFER_BLOCKING": ("barriers", 4),
    "MUFU.EX2": ("special functions", 4),
    "F2FP.BF16.F32.PACK_AB": ("conversions", 4),
    "UTCATOMSWS.AND": ("others", 4),
    "buffer_load_dwordx4": ("loads", 16),
    "v_mfma_f32_16x16x16_bf16": ("products", 4),
}


@pytest.mark.parametrize("opcode", KINDS)
def test_kinds_and_widths_of_instructions(opcode):
    kind, size = KINDS[opcode]
    assert loops.kind_of(opcode) == kind
    if kind in ("copies", "loads", "stores"):
        assert loops.access_bytes(opcode) == size


AMD = """
	s_mov_b32 s4, 0
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	s_and_saveexec_b64 s[2:3], vcc
	s_cbranch_execz .LBB0_4
	buffer_load_dwordx4 v[0:3], v4, s[8:11], 0 offen
.LBB0_4:
	v_mfma_f32_16x16x16_bf16 a[0:3], v[4:5], v[6:7], a[0:3]
	s_barrier
	s_cbranch_scc1 .LBB0_2
	s_endpgm
"""


def test_loops_of_amd_have_what_some_lanes_skip():
    found = loops.amd_loops(AMD)
    assert found.loops == 1
    assert found.mix == {
        "all": 6,
        "others": 3,
        "loads": 1,
        "products": 1,
        "barriers": 1,
        "work": 16 * 16 * 16,
    }


TTGIR = """
    %3 = ttg.local_alloc : () -> !ttg.memdesc<128x128xbf16, #shared, #smem, mutable> loc(#loc80)
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x128x64xbf16, #shared, #smem, mutable> loc(#loc140)
    %w = ttg.local_alloc : () -> !ttg.memdesc<4x256x64xbf16, #shared, #smem, mutable> loc(#loc143)
    %8 = ttg.local_alloc : () -> !ttg.memdesc<4x1xi64, #shared1, #smem, mutable> loc(#loc21)
    %5 = ttg.memdesc_index %8[%c0] : !ttg.memdesc<4x1xi64, #shared1, #smem, mutable> -> !ttg.memdesc<1xi64>
    %6 = ttg.memdesc_index %a[%c0] : !ttg.memdesc<3x128x64xbf16, #shared, #smem, mutable> -> !ttg.memdesc<128>
    %7 = ttg.memdesc_index %w[%c0] : !ttg.memdesc<4x256x64xbf16, #shared, #smem, mutable> -> !ttg.memdesc<256>
"""


def test_buffers_that_are_taken_by_number_are_a_pipeline():
    assert loops.copied_ahead(TTGIR) == (4, 3)
    assert loops.copied_ahead(TTGIR.replace("memdesc_index", "memdesc_trans").replace(" ->", ";")) == ()
