"""Each rule for compiled kernels, broken alone. Nothing is compiled."""

from dataclasses import replace

import pytest

from tests.gate.samples import FACTS as budgeted
from tests.gate.samples import entry_of
from tpkernels.gate.expectations import violations
from tpkernels.gate.ptx_flow import NO_FLAG
from tpkernels.kernels.tiles import MatmulTile, without_spills

LINEAR = entry_of("linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z")
FP32_TILE = without_spills("linear", MatmulTile.named("64x64x16-w8-s3-p1"))
TRUE_FP32 = entry_of(f"linear/pointer/fp32/{FP32_TILE.name}/gelu_tanh+bias+z")
POINTER = entry_of("linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z")
SOUND = {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 2}
FACTS = replace(budgeted, instructions=SOUND, aligned=LINEAR.aligned, narrow_offsets=())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"instructions": {"UTMALDG": 2, "UTMASTG": 2, "HMMA": 9}}, "no HGMMA"),
        ({"instructions": {"HGMMA": 4, "UTMASTG": 2}}, "no UTMALDG"),
        ({"instructions": {"HGMMA": 4, "UTMALDG": 2}}, "no UTMASTG"),
        ({"instructions": dict(FACTS.instructions) | {"HMMA": 9}}, "9 HMMA, expected none"),
        ({"in_flight": 0}, "wgmma serialised"),
        ({"stack": 8}, "spills: 0 loads and stores of local memory, 8 bytes"),
        ({"narrow_offsets": ("%o = arith.muli %a, %b : i32",)}, "32-bit product in an address"),
    ],
)
def test_each_rule_can_be_broken(change, expected):
    assert [*violations(LINEAR, "sm_90", FACTS)] == []
    assert any(
        failure.startswith(expected) for failure in violations(LINEAR, "sm_90", replace(FACTS, **change))
    )


def test_true_fp32_may_not_use_tensor_cores():
    facts = replace(FACTS, aligned=TRUE_FP32.aligned, instructions={"LDGSTS.128": 1, "FFMA": 5})
    assert [*violations(TRUE_FP32, "sm_80", facts)] == []
    cheating = replace(facts, instructions={"LDGSTS.128": 1, "FFMA": 5, "HMMA": 1})
    assert [*violations(TRUE_FP32, "sm_80", cheating)] == ["1 HMMA, expected none (products in true fp32)"]
    pairs = replace(facts, instructions={"LDGSTS.128": 1, "FFMA2": 5})
    assert [*violations(TRUE_FP32, "sm_100", pairs)] == []
    idle = replace(facts, instructions={"LDGSTS.128": 1})
    assert [*violations(TRUE_FP32, "sm_100", idle)] == ["no FFMA or FFMA2"]


def test_true_fp32_on_amd_may_use_the_matrix_units_but_not_their_short_form():
    facts = replace(FACTS, aligned=TRUE_FP32.aligned, instructions={"v_mfma": 24})
    assert [*violations(TRUE_FP32, "gfx942", facts)] == []
    short = replace(facts, instructions={"v_mfma": 24, "v_mfma.xf32": 24})
    assert [*violations(TRUE_FP32, "gfx942", short)] == [
        "24 v_mfma.xf32, expected none (products in true fp32)"
    ]
    assert [*violations(TRUE_FP32, "gfx942", replace(facts, instructions={}))] == ["no v_mfma"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_pointer_kernels_multiply_on_some_tensor_core(architecture):
    facts = replace(FACTS, aligned=POINTER.aligned, instructions={"LDGSTS.128": 1, "HMMA": 4})
    assert [*violations(POINTER, architecture, facts)] == []
    plain = replace(facts, instructions={"LDGSTS.128": 1, "FFMA": 4})
    assert [*violations(POINTER, architecture, plain)] == ["no HGMMA or UTCHMMA or HMMA"]


NEEDED = {  # entry, architecture, what it does without any of which a rule is broken
    "blackwell": (
        "sm_100/linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z",
        "sm_100",
        {"UTCHMMA": 4, "UTMALDG": 2, "UTMASTG": 2},
    ),
    "in_roles_of_triton": (
        "sm_100/linear/descriptor/bf16/128x256x64-w8-s4-p2-flat-ws/gelu_tanh+bias+z",
        "sm_100",
        {"UTCHMMA": 4, "UTMALDG": 2, "UTMASTG": 2},
    ),
    "pushes_by_threads": (
        "scatter_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/one",
        "sm_90",
        {"HGMMA": 4, "UTMALDG": 2, "STG.128": 2},
    ),
}


@pytest.mark.parametrize(("name", "architecture", "instructions"), NEEDED.values(), ids=NEEDED)
def test_each_of_these_instructions_is_needed(name, architecture, instructions):
    entry = entry_of(name)
    facts = replace(FACTS, aligned=entry.aligned, instructions=instructions, threads=384)
    assert [*violations(entry, architecture, facts)] == []
    for one in instructions:
        without = {other: count for other, count in instructions.items() if other != one}
        assert f"no {one}" in violations(entry, architecture, replace(facts, instructions=without))


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("gather_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/depth_first", "unordered_reads"),
        ("gather_linear/pointer/bf16/128x128x32-w8-s3-p1/depth_first", "unordered_reads"),
        ("reduce_slots/pointer/bf16/16x128/bias+wait", "unordered_reads"),
        ("reduce_slots/pointer/fp32/16x128/bias+tree8+wait", "unordered_reads"),
        ("scatter_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/one", "unordered_flags"),
        (f"scatter_linear/pointer/fp32/{FP32_TILE.name}/two+depth_first", "unordered_flags"),
    ],
)
def test_kernels_with_flags_are_held_to_their_order(name, fact):
    assert NO_FLAG not in violations(entry_of(name), "sm_90", FACTS)
    early = replace(FACTS, **{fact: (NO_FLAG,)})
    assert NO_FLAG in violations(entry_of(name), "sm_90", early)
    assert NO_FLAG not in violations(entry_of(name), "gfx942", early)  # of which no PTX tells
    others = replace(FACTS, unordered_reads=(NO_FLAG,), unordered_flags=(NO_FLAG,))
    assert NO_FLAG not in violations(LINEAR, "sm_90", others)


def test_more_blocks_than_an_sm_holds_are_seen():
    twice = replace(LINEAR, name=LINEAR.name.replace("-flat", "-x2"))
    fits = replace(FACTS, registers=128, threads=256, shared=113 * 1024)
    assert [*violations(twice, "sm_90", fits)] == []
    assert [*violations(LINEAR, "sm_90", replace(fits, registers=129))] == []
    assert [*violations(twice, "sm_90", replace(fits, registers=129))] == [
        "2 blocks an SM are launched, its registers hold 1"
    ]
    assert [*violations(twice, "sm_90", replace(fits, shared=113 * 1024 + 1))] == [
        "2 blocks an SM are launched, its bytes of shared memory hold 1"
    ]


def test_steps_between_warps_are_asked_of_all():
    assert "no fence" in violations(LINEAR, "sm_90", replace(FACTS, unordered_roles=("no fence",)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"exposed_waits": 8}, "8 waits for copies that the same warps start, expected none of a consumer"),
        ({"loads_during_stores": False}, "no role of its own loads while results are stored"),
        ({"products_during_stores": False}, "no product can run while results are stored"),
    ],
)
def test_kernels_in_roles_keep_what_they_are_written_for(change, expected):
    facts = replace(FACTS, exposed_waits=0, loads_during_stores=True, products_during_stores=True)
    ping_pong = replace(LINEAR, name=LINEAR.name.replace("-flat", "-c2"))
    assert [*violations(ping_pong, "sm_90", facts)] == []
    assert [*violations(ping_pong, "sm_90", replace(facts, **change))] == [expected]
    together = replace(LINEAR, name=LINEAR.name.replace("-flat", "-c1"))
    of_one = [*violations(together, "sm_90", replace(facts, **change))]
    assert of_one == ([] if "products_during_stores" in change else [expected])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"threads": 256}, "no warps of their own for copies and products"),
        ({"spills": 2, "stack": 8}, "spills: 2 loads and stores of local memory, 8 bytes of stack"),
    ],
)
def test_roles_that_triton_is_asked_for_are_there_and_spill_nothing(change, expected):
    name, architecture, instructions = NEEDED["in_roles_of_triton"]
    entry = entry_of(name)
    facts = replace(FACTS, aligned=entry.aligned, instructions=instructions, threads=384)
    assert [*violations(entry, architecture, facts)] == []
    assert [*violations(entry, architecture, replace(facts, **change))] == [expected]
    plain = entry_of(NEEDED["blackwell"][0])
    assert [*violations(plain, architecture, replace(facts, **change))] == []


@pytest.mark.parametrize("kernel", ["softmax_statistics", "cross_entropy_grad"])
def test_cross_entropy_loads_16_bytes_of_logits_at_a_time(kernel):
    entry = entry_of(f"{kernel}/pointer/bf16/2048")
    assert "columns" not in entry.aligned
    facts = replace(FACTS, aligned=entry.aligned, instructions={"LDG": 3, "LDG.128": 1})
    assert [*violations(entry, "sm_90", facts)] == []
    one_by_one = replace(facts, instructions={"LDG": 10})
    assert [*violations(entry, "sm_90", one_by_one)] == ["no LDG.128"]
    assert [*violations(entry, "gfx942", one_by_one)] == []
