"""Each rule for compiled kernels, broken alone. Nothing is compiled."""

from dataclasses import replace

import pytest

from tpkernels.kernels.ahead_of_time import Facts
from tpkernels.kernels.catalog import catalog
from tpkernels.kernels.expectations import violations

ENTRIES = {entry.name: entry for entry in catalog()}
LINEAR = ENTRIES["linear/descriptor/bf16/128x256x64/gelu_tanh+bias+z"]
TRUE_FP32 = ENTRIES["linear/pointer/fp32/64x64x16/gelu_tanh+bias+z"]
FACTS = Facts(
    registers=163,
    stack=0,
    spills=0,
    shared=1000,
    in_flight=1,
    instructions={"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 2},
    aligned=LINEAR.aligned,
    narrow_offsets=(),
    seconds=1.0,
)


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
