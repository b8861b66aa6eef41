"""Each rule passes what is sound and tells of what breaks it; our kernels are held to theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gate.samples import FACTS, entry_of
from tpkernels.gate.ahead_of_time import ARCHITECTURES, Facts
from tpkernels.gate.rules import DEFAULT_RULES, RULES, RULES_WITH_VALUE, rule_named, violations
from tpkernels.registered.entries import catalog
from tpkernels.registered.recording import COUNTS


def with_mix(text: str) -> Facts:
    """text: counts of instructions, such as "HGMMA 4, FFMA 9" """
    mix = {name: int(count) for name, count in (one.split() for one in text.split(", "))}
    return replace(FACTS, threads=256, instructions=mix, narrow_offsets=())


SOUND = with_mix("HGMMA 4, UTCHMMA 4, v_mfma 4, LDGSTS.128 3, UTMALDG 2, UTMASTG 1")
FP8 = replace(with_mix("QGMMA 4, QGMMA.RZ 1, QGMMA.gsb0 1"), in_flight=0)  # promoted
FAST = with_mix("QGMMA 4")
AMD = "gfx942"
CONVERTED = "expected none (fp8 is converted before it is multiplied)"
SERIALISED = "wgmma serialised: no product runs while the next operands are awaited"
BROKEN = {  # rule, facts, architecture, where it is not asked for, what is told
    "no_spills": ("no_spills", replace(SOUND, spills=7, stack=64), "sm_90", "sm_80", "spills: 7 loads and"),
    "stack": ("no_spills", replace(SOUND, stack=8), "sm_90", None, "spills: 0 loads and stores of local mem"),
    "vector_loads": ("vector_loads", with_mix("LDG 9"), "sm_80", AMD, "no LDG.128 or LDGSTS.128 or UTMALDG"),
    "vector_stores": ("vector_stores", with_mix("STG 9"), "sm_80", AMD, "no STG.128 or UTMASTG or UTMAREDG"),
    "async_loads": ("async_loads", with_mix("LDG.128 9"), "sm_80", AMD, "no LDGSTS.128 or UTMALDG"),
    "tensor_cores": ("tensor_cores", with_mix("FFMA 9"), AMD, None, "no v_mfma: no tensor core is used"),
    "tensor_cores_of_others": ("tensor_cores", with_mix("FFMA 9"), "sm_80", None, "no UTCHMMA or UTCQMMA or"),
    "wgmma": ("wgmma", replace(SOUND, in_flight=0), "sm_90", "sm_80", "wgmma serialised"),
    "no_wgmma": ("wgmma", with_mix("FFMA 8"), "sm_90", "sm_100", "no HGMMA or QGMMA"),
    "older": (
        "wgmma",
        with_mix("HGMMA 4, HMMA 8"),
        "sm_90",
        "sm_80",
        "8 HMMA, expected none (the tensor core",
    ),
    "tensor_memory": ("tensor_memory", with_mix("HMMA 9"), "sm_100", "sm_120", "no UTCHMMA or UTCQMMA"),
    "products_overlap": ("products_overlap", replace(SOUND, in_flight=0), "sm_90", "sm_80", SERIALISED),
    "fp8_overlaps": (
        "products_overlap",
        replace(with_mix("QGMMA 4, QGMMA.RZ 1, QGMMA.gsb0 4"), in_flight=0),
        "sm_90",
        "sm_80",
        "wgmma serialised: each product in fp8 is awaited before the next is started",
    ),
    "fast_overlaps": ("products_overlap", replace(FAST, in_flight=0), "sm_90", "sm_80", SERIALISED),
    "true_fp32": (
        "true_fp32",
        with_mix("HMMA 1, FFMA 9, v_mfma 1"),
        "sm_80",
        AMD,
        "1 HMMA, expected none (products in ",
    ),
    "idle": ("true_fp32", with_mix("LDG 9"), "sm_100", None, "no FFMA or FFMA2"),
    "xf32": ("true_fp32", with_mix("v_mfma 4, v_mfma.xf32 4"), AMD, None, "4 v_mfma.xf32, expected none"),
    "idle_on_amd": ("true_fp32", with_mix("FFMA 9"), AMD, "sm_80", "no v_mfma"),
    "descriptors": ("descriptors", with_mix("LDG 9"), "sm_100", "sm_120", "no UTMALDG"),
    "wide_offsets": (
        "wide_offsets",
        replace(SOUND, narrow_offsets=("%7",)),
        "sm_80",
        None,
        "32-bit product in an address",
    ),
    "reads": ("reads_after_flags", replace(SOUND, unordered_reads=("early",)), "sm_90", None, "early"),
    "flags": ("flags_after_rows", replace(SOUND, unordered_flags=("early",)), "sm_90", None, "early"),
    "aligned": ("aligned:w,x,y,a", SOUND, "sm_80", None, "16-byte alignment lost: a, y"),
    "registers": (
        "blocks:2",
        replace(SOUND, registers=129),
        "sm_90",
        AMD,
        "2 blocks an SM are launched, its registers",
    ),
    "shared": (
        "blocks:2",
        replace(SOUND, registers=128, shared=113 * 1024 + 1),
        "sm_90",
        None,
        "2 blocks an SM are launched, its bytes of shared memory hold 1",
    ),
    "uses": ("uses:LDG.128", SOUND, "sm_80", AMD, "no LDG.128"),
    "no_fp8": ("fp8:promoted", SOUND, "sm_80", None, "sm_80 multiplies no fp8: expected one of sm_89"),
    "fp8_as_16_bits": (
        "fp8:promoted",
        replace(with_mix("QGMMA 4, QGMMA.RZ 1, HMMA 8"), in_flight=0),
        "sm_90",
        None,
        f"8 HMMA, {CONVERTED}",
    ),
    "unpromoted": (
        "fp8:promoted",
        FAST,
        "sm_90",
        None,
        "sums of fp8 are not promoted: 0 of 4 products begin one, expected each 4th",
    ),
    "promoted_in_vain": (
        "fp8:fast",
        FP8,
        "sm_90",
        None,
        "sums of fp8 are promoted, though fast accumulation is asked for: 1 of 4 products begin one",
    ),
}


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


@pytest.mark.parametrize(
    ("rules", "architecture", "facts"),
    [
        (["fp8:promoted", "products_overlap"], "sm_90", FP8),
        (["fp8:fast", "products_overlap"], "sm_90", FAST),
        (["fp8:promoted"], "sm_89", with_mix("QMMA 4, QMMA.RZ 1")),
        (["fp8:promoted"], "sm_120", with_mix("QMMA 4, QMMA.RZ 1")),
        (["fp8:promoted"], "sm_100", with_mix("UTCQMMA 8")),
        (["true_fp32"], "sm_80", with_mix("FFMA 5")),
        (["true_fp32"], "sm_100", with_mix("FFMA2 5")),
        (["true_fp32"], AMD, with_mix("v_mfma 4")),
        (["blocks:2"], "sm_90", replace(SOUND, registers=128, shared=113 * 1024)),
    ],
    ids=[
        "promoted",
        "fast",
        "ada",
        "smaller_blackwell",
        "blackwell",
        "fp32",
        "pairs_of_fp32",
        "fp32_on_amd",
        "blocks",
    ],
)
def test_what_is_sound_on_one_gpu_passes(rules, architecture, facts):
    assert [*violations(rules, architecture, facts)] == []


def test_that_a_block_can_be_launched_is_always_a_rule():
    (found,) = violations([], "sm_90", replace(SOUND, shared=300_000))
    assert found == "shared memory 300,000 > 232,448 bytes: cannot be launched"


@pytest.mark.parametrize("text", ["speed", "no_spills:1", "uses", "blocks:two", "fp8:slow", ""])
def test_unknown_rules_are_none(text):
    assert rule_named(text) is None


ALL = {"no_spills", "wide_offsets"}
OURS = {  # entry -> its rules beside those of all and "aligned"
    "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z": (
        {"tensor_cores", "descriptors", "uses:UTMASTG", "wgmma", "tensor_memory"}
    ),
    "wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32": (
        {"tensor_cores", "descriptors", "uses:UTMAREDG", "wgmma", "tensor_memory"}
    ),
    "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z": (
        {"tensor_cores", "products_overlap", "uses:LDGSTS.128"}
    ),
    "linear/descriptor/bf16/128x128x64-w4-s3-p2-x2/none": (
        {"tensor_cores", "descriptors", "uses:UTMASTG", "wgmma", "tensor_memory", "blocks:2"}
    ),
    "gather_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/depth_first": (
        {"tensor_cores", "descriptors", "uses:UTMASTG", "wgmma", "tensor_memory", "reads_after_flags"}
    ),
    "reduce_slots/pointer/bf16/16x128/bias+wait": {"reads_after_flags"},
    "reduce_slots/pointer/bf16/16x128/bias": set(),
    "scatter_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/one": (
        {"tensor_cores", "descriptors", "uses:STG.128", "wgmma", "tensor_memory", "flags_after_rows"}
    ),
    "softmax_statistics/pointer/bf16/2048": {"uses:LDG.128"},
    "cross_entropy_grad/pointer/bf16/2048": {"uses:LDG.128"},
    "scaled_linear/descriptor/fp8e4nv/128x128x128-w8-s4-p2-flat/gelu_tanh+bias+z": (
        {"fp8:promoted", "descriptors", "uses:UTMASTG", "products_overlap"}
    ),
    "scaled_linear/descriptor/fp8e4nv/128x128x128-w8-s4-p2-flat/gelu_tanh+bias+z+fast": (
        {"fp8:fast", "descriptors", "uses:UTMASTG", "products_overlap"}
    ),
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
