"""What is read off a disassembly, and proven from Triton's intermediate code."""

import pytest

from tpkernels.gate import disassembly, triton_ir

SERIALISED = """
        /*3b30*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR48], R88, gsb0 ;
        /*3c10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3c20*/              @!P0 LDGSTS.E.BYPASS.128 [R3], [R2.64] ;
        /*3c30*/                   LDGSTS.E [R3], [R2.64] ;
"""


def test_sass_is_counted_by_family_and_width():
    assert disassembly.sass_mix(SERIALISED) == {"HGMMA": 1, "LDGSTS": 2, "LDGSTS.128": 1, "all": 4}
    assert disassembly.wgmma_in_flight(SERIALISED) == 0
    assert disassembly.wgmma_in_flight(SERIALISED.replace("0x0 ;", "0x1 ;")) == 1


# fp8 that is promoted: a batch of two products, the first of which is added to zero, is awaited, and then
# once more, when nothing is in flight
PROMOTED = """
        /*0e20*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], RZ, !UPT ;
        /*0e70*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], R24, gsb0 ;
        /*0e80*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0e90*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0ea0*/                   QMMA.16832.F32.E5M2.E4M3 R16, R36.ROW, R28.COL, RZ ;
"""


def test_products_of_fp8_are_counted_by_where_they_stand_in_a_sum():
    counts = {"QGMMA": 2, "QGMMA.RZ": 1, "QGMMA.gsb0": 1, "QMMA": 1, "QMMA.RZ": 1, "all": 5}
    assert disassembly.sass_mix(PROMOTED) == counts
    assert disassembly.wgmma_in_flight(PROMOTED) == 0
    product = PROMOTED.splitlines()[2]
    awaited_later = PROMOTED.replace("gsb0, 0x0 ;\n", f"gsb0, 0x0 ;\n{product}\n")
    assert disassembly.wgmma_in_flight(awaited_later) == 1


AMD = """
	v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, v[0:15]
	v_mfma_f32_16x16x8_xf32 a[0:3], v[4:5], v[6:7], a[0:3]
	ds_read_b128 v[4:7], v8
	s_waitcnt lgkmcnt(0)
	.vgpr_count:     94
	.vgpr_spill_count: 2
	.sgpr_spill_count: 3
	.private_segment_fixed_size: 20
"""


def test_amd_assembly_is_counted_by_family_and_short_products_apart():
    assert disassembly.amd_mix(AMD) == {"v_mfma": 2, "v_mfma.xf32": 1, "ds_read": 1, "all": 4}
    assert disassembly.amd_resources(AMD) == (94, 20, 5)


TTIR = """
  tt.func public @kernel(%x: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x"(#loc)), %n: i32) {
    %c8 = arith.constant 8 : i32 loc(#loc1)
    %pid = tt.get_program_id x : i32 loc(#loc1)
    %block = arith.muli %pid, %c8 : i32 loc(#loc1)
    %wide = arith.extsi %block : i32 to i64 loc(#loc1)
    %n64 = arith.extsi %n : i32 to i64 loc(#loc1)
    %good = arith.muli %wide, %n64 : i64 loc(#loc1)
    %bad = arith.muli %block, %n : i32 loc(#loc1)
    %late = arith.extsi %bad : i32 to i64 loc(#loc1)
    %out = scf.for %i = %c8 to %n step %c8 iter_args(%at = %good) -> (i64)  : i32 {
      %p = tt.addptr %x, OFFSET : !tt.ptr<bf16>, i64 loc(#loc1)
      %next = arith.addi %at, NEXT : i64 loc(#loc1)
      scf.yield %next : i64 loc(#loc1)
    } loc(#loc2)
"""


@pytest.mark.parametrize(
    ("offset", "following", "narrow"),
    [("%good", "%n64", False), ("%late", "%n64", True), ("%at", "%n64", False), ("%at", "%late", True)],
    ids=["wide", "widened_too_late", "carried_wide", "carried_narrow"],
)
def test_narrow_offsets_are_followed_to_their_product(offset, following, narrow):
    text = TTIR.replace("OFFSET", offset).replace("NEXT", following)
    expected = ("%bad = arith.muli %block, %n : i32",) if narrow else ()
    assert triton_ir.narrow_offsets(text) == expected
    assert triton_ir.aligned_arguments(text) == {"x"}


SUMS = """#loc = loc("/team/norm.py":3:0)
#loc15 = loc("/team/norm.py":10:26)
    %turned = scf.for %s = %zero to %n step %c1024 iter_args(%sum = %start) -> (tensor<1024xKIND>)  : i32 {
      %scaled = arith.addf %loaded, %loaded : tensor<1024xf16> loc(#loc1)
      %next = arith.addf %sum, %loaded : tensor<1024xKIND> loc(#loc41)
      %product = tt.dot %a, %b, PLUS : tensor<32x32xf16> -> tensor<32x32xDOT> loc(#loc3)
      scf.yield %next : tensor<1024xKIND> loc(#loc1)
    } loc(#loc1)
    %0 = "tt.reduce"(%turned) <{axis = 0 : i32}> ({
    ^bb0(%arg3: OVER loc(unknown), %arg4: OVER loc(unknown)):
      %7 = arith.addf %arg3, %arg4 : OVER loc(#loc54)
      tt.reduce.return %7 : OVER loc(#loc1)
    }) : (tensor<1024xOVER>) -> OVER loc(#loc1)
    %8 = arith.addf %0, %0 : f16 loc(#loc1)
#loc1 = loc("/team/norm.py":99:9)
#loc3 = loc("/team/norm.py":7:20)
#loc10 = loc("/team/norm.py":8:13)
#loc14 = loc("/usr/lib/triton/language/standard.py":293:36)
#loc16 = loc("/usr/lib/triton/language/standard.py":263:15)
#loc41 = loc("t"(#loc10))
#loc44 = loc(callsite(#loc14 at #loc15))
#loc54 = loc(callsite(#loc16 at #loc44))
"""
WIDE = {"KIND": "f32", "DOT": "f32", "OVER": "f32", "PLUS": "%sum"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ()),
        ({"KIND": "f16"}, ("fp16 (norm.py:8)",)),
        ({"KIND": "bf16"}, ("bf16 (norm.py:8)",)),
        ({"OVER": "f16"}, ("fp16 (norm.py:10)",)),
        ({"DOT": "f16"}, ("fp16 (norm.py:7)",)),
        ({"DOT": "f16", "PLUS": "%start"}, ("fp16 (norm.py:7)",)),
    ],
    ids=["wide", "carried", "carried_bf16", "reduced", "dot", "dot_alone"],
)
def test_sums_in_16_bits_are_told_by_line(change, told):
    text = SUMS
    for name, value in (WIDE | change).items():
        text = text.replace(name, value)
    assert triton_ir.narrow_sums(text) == told


BRANCHES = """
  tt.func public @kernel(%x: !tt.ptr<bf16> loc("x"(#loc)), %n: i32, %flag: i1) {
    %zero = arith.constant 0 : i32 loc(#loc1)
    %bad = arith.muli %n, %n : i32 loc(#loc1)
    scf.for %i = %zero to %n step %n iter_args(%at = %zero, %seen = %zero) -> (i32, i32)  : i32 {
      %chosen = scf.if %flag -> (i32) {
        scf.yield BRANCH : i32 loc(#loc2)
      } else {
        scf.yield %zero : i32 loc(#loc2)
      } loc(#loc2)
      %spun:2 = scf.while (%turn = %zero, %last = %zero) : (i32, i32) -> (i32, i32) {
        scf.condition(%flag) CONDITION, %last : i32, i32 loc(#loc2)
      } do {
      ^bb0(%body: i32 loc("body"), %other: i32 loc("other")):
        %p = tt.addptr %x, INSIDE : !tt.ptr<bf16>, i32 loc(#loc1)
        scf.yield %body, %zero : i32, i32 loc(#loc2)
      } loc(#loc3)
      %q = tt.addptr %x, OFFSET : !tt.ptr<bf16>, i32 loc(#loc1)
      scf.yield NEXT, %zero : i32, i32 loc(#loc1)
    } {tt.num_stages = 3 : i32} loc(#loc2)
"""
SOUND = {"BRANCH": "%zero", "CONDITION": "%turn", "INSIDE": "%zero", "OFFSET": "%zero", "NEXT": "%zero"}


@pytest.mark.parametrize(
    "change",
    [
        {"BRANCH": "%bad", "OFFSET": "%chosen"},
        {"CONDITION": "%bad", "OFFSET": "%spun#1"},
        {"CONDITION": "%bad", "INSIDE": "%body"},
        {"NEXT": "%bad", "OFFSET": "%at"},
    ],
    ids=["result_of_a_branch", "result_of_a_loop", "body_of_a_loop", "carried_past_inner_regions"],
)
def test_narrow_offsets_are_followed_through_branches_and_loops(change):
    def findings(words):
        text = BRANCHES
        for name, value in words.items():
            text = text.replace(name, value)
        return triton_ir.narrow_offsets(text)

    assert findings(SOUND | {"OFFSET": change.get("OFFSET", "%zero")}) == ()
    assert findings(SOUND | change) == ("%bad = arith.muli %n, %n : i32",)
