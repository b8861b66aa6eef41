"""Each rule passes what is sound and tells of what breaks it; our kernels keep theirs; blocks an SM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gate.samples import FACTS, entry_of
from tpkernels.gate.ahead_of_time import ARCHITECTURES, Facts
from tpkernels.gate.occupancy import BLOCK_BYTES, PROCESSORS, SHARED_LIMIT, blocks_by_limit
from tpkernels.gate.rules import DEFAULT_RULES, RULES, RULES_WITH_VALUE, rule_named, violations
from tpkernels.registered.entries import catalog
from tpkernels.registered.recording import COUNTS


def with_mix(text: str) -> Facts:
    """text: counts of instructions, such as "HGMMA 4, FFMA 9" """
    mix = {name: int(count) for name, count in (one.split() for one in text.split(", "))}
    return replace(FACTS, threads=256, instructions=mix, narrow_offsets=())


SOUND = with_mix("HGMMA 4, UTCHMMA 4, v_mfma 4, LDGSTS.128 3, UTMALDG 2, UTMASTG 1")
FULL = replace(SOUND, registers=128, shared=113 * 1024)  # two of which fit an SM
NARROW = replace(SOUND, narrow_offsets=("%7",))
HALF = replace(SOUND, narrow_sums=("fp16 (norm.py:12)",))
IDLE, OLDER, MIXED = map(with_mix, ("FFMA 9", "HGMMA 4, HMMA 8", "HMMA 1, FFMA 9, v_mfma 1"))
FP8 = replace(with_mix("QGMMA 4, QGMMA.RZ 1, QGMMA.gsb0 1"), in_flight=0)  # promoted
FP8_ALONE = replace(with_mix("QGMMA 4, QGMMA.RZ 1, QGMMA.gsb0 4"), in_flight=0)
WIDENED = replace(with_mix("QGMMA 4, QGMMA.RZ 1, HMMA 8"), in_flight=0)
FAST = with_mix("QGMMA 4")
AMD = "gfx942"
CONVERTED = "expected none (fp8 is converted before it is multiplied)"
SERIALISED = "wgmma serialised: no product runs while the next operands are awaited"
SERIALISED_FP8 = "wgmma serialised: each product in fp8 is awaited before the next is started"
TOO_FEW, SHARED = "2 blocks an SM are launched, its", "bytes of shared memory"
UNPROMOTED = "sums of fp8 are not promoted: 0 of 4 products begin one"
IN_VAIN = "sums of fp8 are promoted, though fast accumulation is asked for"
BROKEN = {  # rule, facts, architecture, where it is not asked for, what is told
    "no_spills": ("no_spills", replace(SOUND, spills=7, stack=64), "sm_90", "sm_80", "spills: 7 loads and"),
    "stack": ("no_spills", replace(SOUND, stack=8), "sm_90", None, "spills: 0 loads and stores of local mem"),
    "vector_loads": ("vector_loads", with_mix("LDG 9"), "sm_80", AMD, "no LDG.128 or LDGSTS.128 or UTMALDG"),
    "vector_stores": ("vector_stores", with_mix("STG 9"), "sm_80", AMD, "no STG.128 or UTMASTG or UTMAREDG"),
    "async_loads": ("async_loads", with_mix("LDG.128 9"), "sm_80", AMD, "no LDGSTS.128 or UTMALDG"),
    "tensor_cores": ("tensor_cores", IDLE, AMD, None, "no v_mfma: no tensor core is used"),
    "tensor_cores_of_others": ("tensor_cores", IDLE, "sm_80", None, "no UTCHMMA or UTCQMMA or"),
    "wgmma": ("wgmma", replace(SOUND, in_flight=0), "sm_90", "sm_80", "wgmma serialised"),
    "no_wgmma": ("wgmma", IDLE, "sm_90", "sm_100", "no HGMMA or QGMMA"),
    "older": ("wgmma", OLDER, "sm_90", "sm_80", "8 HMMA, expected none (the tensor core"),
    "tensor_memory": ("tensor_memory", with_mix("HMMA 9"), "sm_100", "sm_120", "no UTCHMMA or UTCQMMA"),
    "products_overlap": ("products_overlap", replace(SOUND, in_flight=0), "sm_90", "sm_80", SERIALISED),
    "fp8_overlaps": ("products_overlap", FP8_ALONE, "sm_90", "sm_80", SERIALISED_FP8),
    "fast_overlaps": ("products_overlap", replace(FAST, in_flight=0), "sm_90", "sm_80", SERIALISED),
    "true_fp32": ("true_fp32", MIXED, "sm_80", AMD, "1 HMMA, expected none (products in "),
    "idle": ("true_fp32", with_mix("LDG 9"), "sm_100", None, "no FFMA or FFMA2"),
    "xf32": ("true_fp32", with_mix("v_mfma 4, v_mfma.xf32 4"), AMD, None, "4 v_mfma.xf32, expected none"),
    "idle_on_amd": ("true_fp32", IDLE, AMD, "sm_80", "no v_mfma"),
    "descriptors": ("descriptors", with_mix("LDG 9"), "sm_100", "sm_120", "no UTMALDG"),
    "wide_offsets": ("wide_offsets", NARROW, "sm_80", None, "32-bit product in an address"),
    "wide_sums": ("wide_sums", HALF, "sm_80", None, "sum in fp16 (norm.py:12): rounded to 16 bits at"),
    "reads": ("reads_after_flags", replace(SOUND, unordered_reads=("early",)), "sm_90", None, "early"),
    "flags": ("flags_after_rows", replace(SOUND, unordered_flags=("early",)), "sm_90", None, "early"),
    "aligned": ("aligned:w,x,y,a", SOUND, "sm_80", None, "16-byte alignment lost: a, y"),
    "registers": ("blocks:2", replace(SOUND, registers=129), "sm_90", AMD, f"{TOO_FEW} registers"),
    "shared": ("blocks:2", replace(FULL, shared=113 * 1024 + 1), "sm_90", None, f"{TOO_FEW} {SHARED} hold 1"),
    "uses": ("uses:LDG.128", SOUND, "sm_80", AMD, "no LDG.128"),
    "no_fp8": ("fp8:promoted", SOUND, "sm_80", None, "sm_80 multiplies no fp8: expected one of sm_89"),
    "fp8_as_16_bits": ("fp8:promoted", WIDENED, "sm_90", None, f"8 HMMA, {CONVERTED}"),
    "unpromoted": ("fp8:promoted", FAST, "sm_90", None, f"{UNPROMOTED}, expected each 4th"),
    "promoted_in_vain": ("fp8:fast", FP8, "sm_90", None, f"{IN_VAIN}: 1 of 4 products begin one"),
}


def test_wrong_machine_code_is_told_without_a_rule():
    assert [*violations((), "sm_90", replace(FACTS, miscompiled=("R24 is read",)))] == ["R24 is read"]
    assert [*violations((), "sm_90", FACTS)] == []


def test_every_rule_is_tried():
    tried = {rule.partition(":")[0] for rule, *_ in BROKEN.values()}
    assert tried == {*RULES, *RULES_WITH_VALUE}
    assert set(DEFAULT_RULES) <= RULES.keys()


@pytest.mark.parametrize("case", BROKEN)
def test_rule_tells_of_what_breaks_it(case):
    rule, facts, architecture, elsewhere, told = BROKEN[case]
    (found,) = violations([rule], architecture, facts)
    assert found.startswith(told)
    assert [*violations([], architecture, facts)] == []
    if elsewhere:
        assert [*violations([rule], elsewhere, facts)] == []


@pytest.mark.parametrize(
    "rule", [*sorted({*RULES} - {"true_fp32"}), "aligned:w,x", "aligned:", "blocks:1", "uses:LDGSTS.128"]
)
def test_rule_passes_what_is_sound(rule):
    for architecture in ARCHITECTURES:
        assert [*violations([rule], architecture, SOUND)] == []


SOUND_THERE = {
    "promoted": (["fp8:promoted", "products_overlap"], "sm_90", FP8),
    "fast": (["fp8:fast", "products_overlap"], "sm_90", FAST),
    "ada": (["fp8:promoted"], "sm_89", with_mix("QMMA 4, QMMA.RZ 1")),
    "smaller_blackwell": (["fp8:promoted"], "sm_120", with_mix("QMMA 4, QMMA.RZ 1")),
    "blackwell": (["fp8:promoted"], "sm_100", with_mix("UTCQMMA 8")),
    "fp32": (["true_fp32"], "sm_80", with_mix("FFMA 5")),
    "pairs_of_fp32": (["true_fp32"], "sm_100", with_mix("FFMA2 5")),
    "fp32_on_amd": (["true_fp32"], AMD, with_mix("v_mfma 4")),
    "blocks": (["blocks:2"], "sm_90", FULL),
}


@pytest.mark.parametrize(("rules", "architecture", "facts"), SOUND_THERE.values(), ids=SOUND_THERE)
def test_what_is_sound_on_one_gpu_passes(rules, architecture, facts):
    assert [*violations(rules, architecture, facts)] == []


def test_that_a_block_can_be_launched_is_always_a_rule():
    (found,) = violations([], "sm_90", replace(SOUND, shared=300_000))
    assert found == "shared memory 300,000 > 232,448 bytes: cannot be launched"


@pytest.mark.parametrize("text", ["speed", "no_spills:1", "uses", "blocks:two", "fp8:slow", ""])
def test_unknown_rules_are_none(text):
    assert rule_named(text) is None


ALL = {"no_spills", "wide_offsets"}
PRODUCT = {"tensor_cores", "descriptors", "wgmma", "tensor_memory"}
PRODUCT_FP8 = {"descriptors", "uses:UTMASTG", "products_overlap"}
TILE, TILE_FP8 = "128x256x64-w8-s4-p2-flat", "128x128x128-w8-s4-p2-flat"
OURS = {  # entry -> its rules beside those of all and "aligned"
    f"linear/descriptor/bf16/{TILE}/gelu_tanh+bias+z": PRODUCT | {"uses:UTMASTG"},
    "wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32": PRODUCT | {"uses:UTMAREDG"},
    "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z": (
        {"tensor_cores", "products_overlap", "uses:LDGSTS.128"}
    ),
    "linear/descriptor/bf16/128x128x64-w4-s3-p2-x2/gelu_tanh+bias+z": PRODUCT | {"uses:UTMASTG", "blocks:2"},
    f"linear/descriptor/bf16/{TILE}/gelu_tanh+bias+z+wait": PRODUCT | {"uses:UTMASTG", "reads_after_flags"},
    "reduce_slots/pointer/bf16/16x128/bias+wait": {"reads_after_flags"},
    "reduce_slots/pointer/bf16/16x128/bias": set(),
    f"scatter_linear/descriptor/bf16/{TILE}/one": PRODUCT | {"uses:STG.128", "flags_after_rows"},
    "softmax_statistics/pointer/bf16/2048": {"uses:LDG.128"},
    "cross_entropy_grad/pointer/bf16/2048": {"uses:LDG.128"},
    "glu_grad/pointer/bf16/32x128/swiglu": {"uses:LDG.128", "uses:STG.128"},
    f"scaled_linear/descriptor/fp8e4nv/{TILE_FP8}/gelu_tanh+bias+z": PRODUCT_FP8 | {"fp8:promoted"},
    f"scaled_linear/descriptor/fp8e4nv/{TILE_FP8}/gelu_tanh+bias+z+fast": PRODUCT_FP8 | {"fp8:fast"},
}


@pytest.mark.parametrize("name", OURS)
def test_our_kernels_are_held_to_their_rules(name):
    entry = entry_of(name)
    (aligned,) = (rule for rule in entry.rules if rule.startswith("aligned:"))
    assert {*entry.rules} - {aligned} == ALL | OURS[name]
    sizes = {one for one, kind in entry.arguments.items() if kind == "i32" or kind[0] == "*"}
    assert {*aligned.removeprefix("aligned:").split(",")} == sizes - COUNTS - entry.unspecialised


def test_true_fp32_and_ragged_addresses_have_rules_of_their_own():
    ours = [(entry.name, entry.rules) for entry in catalog()]
    fp32 = next(rules for name, rules in ours if name.startswith("linear/pointer/fp32/"))
    assert "true_fp32" in fp32
    assert "tensor_cores" not in fp32
    tf32 = next(rules for name, rules in ours if name.endswith("/tf32"))
    assert "tensor_cores" in tf32
    ragged = [rules for name, rules in ours if name.endswith("/ragged")]
    assert not any(rule.startswith(("aligned", "uses:LDGSTS", "reads")) for one in ragged for rule in one)


@pytest.mark.parametrize(
    ("registers", "threads", "blocks"),
    [(255, 256, 1), (168, 384, 1), (128, 256, 2), (129, 256, 1), (168, 128, 3), (64, 128, 8), (32, 1024, 2)],
)
def test_registers_are_given_to_warps_of_a_quarter(registers, threads, blocks):
    assert blocks_by_limit("sm_90", registers, threads, 0)["registers"] == blocks


def test_every_limit_counts():
    assert blocks_by_limit("sm_90", 32, 128, 106_520) == {
        "registers": 16,
        "bytes of shared memory": 2,
        "threads": 16,
        "number of blocks": 32,
    }
    assert blocks_by_limit("sm_89", 32, 512, 0)["threads"] == 3
    assert blocks_by_limit("gfx942", 32, 256, 0) == {}
    assert blocks_by_limit("sm_90", 32, 0, 0) == {}  # threads not known


def test_a_block_may_have_all_but_the_reserve():
    assert set(PROCESSORS) == {name for name in ARCHITECTURES if name.startswith("sm_")}
    for architecture, processor in PROCESSORS.items():
        assert SHARED_LIMIT[architecture] == processor.shared - BLOCK_BYTES
