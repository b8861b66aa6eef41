"""Rules that others may choose: each passes what is sound, and tells of what breaks it, where it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gate.samples import FACTS
from tpkernels.gate.ahead_of_time import ARCHITECTURES
from tpkernels.gate.user_kernels.record import DEFAULT_RULES, RULES, violations

SOUND = replace(
    FACTS,
    instructions={"HGMMA": 4, "UTCHMMA": 4, "v_mfma": 4, "LDGSTS.128": 3, "UTMALDG": 2, "UTMASTG": 1},
    narrow_offsets=(),
)


def with_mix(**mix: int):
    return replace(SOUND, instructions=mix)


BROKEN = {  # facts, architecture, where it is not asked for, what is told
    "no_spills": (replace(SOUND, spills=7, stack=64), "sm_90", "sm_80", "spills: 7 loads and stores"),
    "vector_loads": (with_mix(LDG=9), "sm_80", "gfx942", "no LDG.128 or LDGSTS.128 or UTMALDG"),
    "vector_stores": (with_mix(STG=9), "sm_80", "gfx942", "no STG.128 or UTMASTG or UTMAREDG"),
    "async_loads": (with_mix(**{"LDG.128": 9}), "sm_80", "gfx942", "no LDGSTS.128 or UTMALDG"),
    "tensor_cores": (with_mix(FFMA=9), "gfx942", None, "no v_mfma: no tensor core is used"),
    "wgmma": (replace(SOUND, in_flight=0), "sm_90", "sm_80", "wgmma serialised"),
    "descriptors": (with_mix(LDG=9), "sm_100", "sm_120", "no UTMALDG"),
    "wide_offsets": (replace(SOUND, narrow_offsets=("%7",)), "sm_80", None, "32-bit product in an address"),
}


def test_every_rule_is_tried():
    assert BROKEN.keys() == RULES.keys()
    assert set(DEFAULT_RULES) <= RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_rule_tells_of_what_breaks_it(rule):
    facts, architecture, elsewhere, told = BROKEN[rule]
    for one in ARCHITECTURES:
        assert [*violations([rule], one, SOUND)] == []
    (found,) = violations([rule], architecture, facts)
    assert found.startswith(told)
    assert [*violations([], architecture, facts)] == []
    if elsewhere:
        assert [*violations([rule], elsewhere, facts)] == []


def test_older_instructions_and_missing_ones_break_wgmma():
    assert [*violations(["wgmma"], "sm_90", with_mix(HMMA=8))] == [
        "no HGMMA or QGMMA",
        "8 HMMA, expected none (the tensor core's older instruction)",
    ]


def test_that_a_block_can_be_launched_is_always_a_rule():
    (found,) = violations([], "sm_90", replace(SOUND, shared=300_000))
    assert found == "shared memory 300,000 > 232,448 bytes: cannot be launched"
