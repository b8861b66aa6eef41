"""What is proven from Triton's intermediate code."""

import pytest

from tpkernels.gate import triton_ir

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
