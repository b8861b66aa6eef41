"""The gate on fp8: rules broken one by one, kernels that keep them, and wrong numbers."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.compiled import assembly_of
from tests.gate.samples import FACTS as budgeted
from tests.gate.samples import entry_of
from tpkernels.dispatch.primitives import RECORDS
from tpkernels.gate import scaled
from tpkernels.gate.ahead_of_time import Entry, Facts, facts_of
from tpkernels.gate.catalog import entry_specs
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.expectations import violations
from tpkernels.gate.numerics import Frames, NumericCase, RandomOperands, examine
from tpkernels.gate.ptx_flow import Flow
from tpkernels.gate.recording import BARE, HAS_GLUON, MetaOperands, primitive, recorded
from tpkernels.gate.roles import NOT_COUNTED, unordered_roles
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import A100, B200, H100, MI300

TILE = "128x128x128-w8-s4-p2-flat"
DESCRIPTOR = entry_of(f"scaled_linear/descriptor/fp8e4nv/{TILE}/gelu_tanh+bias+z")
FAST = entry_of(f"scaled_linear/descriptor/fp8e4nv/{TILE}/gelu_tanh+bias+z+fast")
BLACKWELL = entry_of(f"sm_100/scaled_linear/descriptor/fp8e4nv/{TILE}/none")
MX = entry_of(f"sm_100/scaled_linear/descriptor/fp8e4nv/{TILE}/none+mx")
POINTER = entry_of("scaled_linear/pointer/fp8e4nv/64x64x128-w4-s3-p1/gelu_tanh+bias+z")
ADA = entry_of("sm_89/scaled_linear/pointer/fp8e4nv/64x64x128-w4-s3-p1/gelu_tanh+bias+z")
HOPPER = {"QGMMA": 4, "QGMMA.RZ": 1, "QGMMA.gsb0": 1, "UTMALDG": 2, "UTMASTG": 2}
FACTS = replace(
    budgeted,
    in_flight=0,
    instructions=HOPPER,
    aligned=frozenset.union(*(one.aligned for one in (DESCRIPTOR, POINTER, ADA, BLACKWELL))),
    narrow_offsets=(),
    exposed_waits=0,
)


def with_mix(**changed: int) -> Facts:
    return replace(FACTS, instructions=HOPPER | {name.replace("_", "."): n for name, n in changed.items()})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (with_mix(QGMMA=0, QGMMA_RZ=0, QGMMA_gsb0=0), ["no QGMMA"]),
        (
            replace(with_mix(HGMMA=4), in_flight=1),
            ["4 HGMMA, expected none (fp8 is converted before it is multiplied)"],
        ),
        (with_mix(HMMA=8), ["8 HMMA, expected none (fp8 is converted before it is multiplied)"]),
        (with_mix(UTMALDG=0), ["no UTMALDG"]),
        (
            with_mix(QGMMA_gsb0=4),
            ["wgmma serialised: each product in fp8 is awaited before the next is started"],
        ),
        (
            with_mix(QGMMA_RZ=0),
            [
                "sums of fp8 are not promoted: 0 of 4 products begin one, expected each 4th",
                "wgmma serialised: no product runs while the next operands are awaited",
            ],
        ),
        (
            replace(FACTS, exposed_waits=2),
            ["2 waits for copies that no product hides, expected none beside fp8"],
        ),
        (replace(FACTS, spills=3), ["spills: 3 loads and stores of local memory, 0 bytes of stack"]),
    ],
)
def test_each_rule_of_hopper_can_be_broken(facts, expected):
    assert [*violations(DESCRIPTOR, "sm_90", FACTS)] == []
    assert [*violations(DESCRIPTOR, "sm_90", facts)] == expected


def test_fast_products_are_in_flight_and_not_promoted():
    unpromoted = replace(with_mix(QGMMA_RZ=0), in_flight=1)
    assert [*violations(FAST, "sm_90", unpromoted)] == []
    assert [*violations(FAST, "sm_90", FACTS)] == [
        "sums of fp8 are promoted, though fast accumulation is asked for: 1 of 4 products begin one"
    ]
    assert [*violations(FAST, "sm_90", replace(unpromoted, in_flight=0))] == [
        "wgmma serialised: no product runs while the next operands are awaited"
    ]


def test_unpromoted_products_may_be_in_flight_but_stay_unpromoted():
    fast = replace(with_mix(QGMMA_RZ=0), in_flight=1)
    (told,) = violations(DESCRIPTOR, "sm_90", fast)
    assert told.startswith("sums of fp8 are not promoted")


@pytest.mark.parametrize("architecture", FP8_PRODUCTS)
def test_each_gpu_multiplies_by_its_own_instruction(architecture):
    own = FP8_PRODUCTS[architecture]
    mix = {"LDGSTS.128": 3, own: 4, f"{own}.RZ": 1, f"{own}.gsb0": 1}
    entry = POINTER if architecture in POINTER.architectures else ADA
    assert [*violations(entry, architecture, replace(FACTS, instructions=mix))] == []
    other = {"LDGSTS.128": 3, "HMMA": 16}
    assert [*violations(entry, architecture, replace(FACTS, instructions=other))][:2] == [
        f"no {own}",
        "16 HMMA, expected none (fp8 is converted before it is multiplied)",
    ]


def test_blackwell_adds_in_fp32_and_is_asked_for_its_tensor_memory_instruction():
    mix = {"UTCQMMA": 8, "UTMALDG": 2, "UTMASTG": 2}
    assert [*violations(BLACKWELL, "sm_100", replace(FACTS, instructions=mix))] == []
    older = replace(FACTS, instructions=mix | {"UTCQMMA": 0, "UTCHMMA": 8})
    assert "no UTCQMMA" in violations(BLACKWELL, "sm_100", older)


CALLS = {
    "scaled_linear": partial(primitive, name="scaled_linear"),
    "quantize": scaled.quantized,
    "quantize_glu": partial(scaled.quantized, name="quantize_glu"),
    "dequantize": partial(primitive, name="dequantize"),
}


@pytest.mark.parametrize("name", CALLS)
def test_gpus_without_fp8_are_refused_by_name(name):
    of = MetaOperands(64, 128, 1024)
    assert recorded(name, CALLS[name], of, H100, ("sm_90",)).function
    with pytest.raises(ValueError, match=r"fp8 expected a GPU of capability 8.9 or later .*, got 8.0"):
        recorded(name, CALLS[name], of, A100, ("sm_80",))
    with pytest.raises(ValueError, match=r"fp8 expected a GPU of capability 8.9 or later .*, got one of AMD"):
        recorded(name, CALLS[name], of, MI300, ("gfx942",))


def test_no_entry_of_fp8_is_compiled_where_it_is_refused():
    fp8 = {"scaled_linear", "quantize", "dequantize"}
    named = [name for name in entry_specs() if "fp8" in name or fp8 & {*name.split("/")}]
    entries = [entry_of(name) for name in named]
    assert {gpu for entry in entries for gpu in entry.architectures} == set(FP8_PRODUCTS)
    assert {entry.function for entry in entries} == {
        *("_scaled_linear_kernel", "_gather_scaled_linear_kernel", "_dequantize_kernel"),
        *(["_scaled_matmul_kernel"] * HAS_GLUON),
        *("_quantize_rows_kernel", "_quantize_strips_kernel", "_quantize_blocks_kernel"),
        "_quantize_rows_and_largest_kernel",
        *("_mx_linear_kernel", "_quantize_mx_kernel"),
    }


def few_rows_of_mx() -> Entry:
    tile = MatmulTile.named("64x128x128-w4-s3-p2-x2")
    of = MetaOperands(2096, 512, 1024, torch.float8_e4m3fn, form="descriptor", tile=tile)
    call = partial(primitive, name="scaled_linear", scaling="mx", **BARE)
    return recorded(MX.name.replace(TILE, tile.name), call, of, B200, ("sm_100",))


JOBS = {
    "sound": (DESCRIPTOR, "sm_90"),
    "sound_blackwell": (BLACKWELL, "sm_100"),
    "sound_ada": (ADA, "sm_89"),
    "sound_mx": (MX, "sm_100"),
    "few_rows_of_mx": (few_rows_of_mx(), "sm_100"),
}


@pytest.fixture
def told(compiler) -> Callable[[str], list[str]]:
    """What is wrong with each of JOBS, as it is compiled."""
    return lambda name: [*violations(*JOBS[name], compiler.run(facts_of, *JOBS[name]))]


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("sound")])
def test_what_is_sound_keeps_the_rules(told, name):
    assert told(name) == []


ROLES = "scaled_linear/descriptor/fp8e4nv/128x256x128-w4-s4-p4-c2h/none"


@pytest.mark.skipif(not HAS_GLUON, reason="Gluon is of another form before Triton 3.7")
def test_machine_code_says_which_sums_in_roles_are_promoted(compiler):
    promoted, fast = entry_of(ROLES), entry_of(f"{ROLES}+fast")
    of_promoted, of_fast = (compiler.run(facts_of, entry, "sm_90") for entry in (promoted, fast))
    assert [*violations(promoted, "sm_90", of_promoted)] == []
    assert [*violations(fast, "sm_90", of_fast)] == []
    assert [one.count("QGMMA") for one in (of_promoted, of_fast)] == [16, 8]  # in two turns, or in one
    assert [one.count("QGMMA.RZ") for one in (of_promoted, of_fast)] == [4, 0]
    (told,) = violations(promoted, "sm_90", of_fast)
    assert told == "sums of fp8 are not promoted: 0 of 8 products begin one, expected each 4th"
    (told,) = violations(fast, "sm_90", of_promoted)
    assert told.startswith("sums of fp8 are promoted, though fast accumulation is asked for")


@pytest.mark.skipif(not HAS_GLUON, reason="Gluon is of another form before Triton 3.7")
def test_a_buffer_that_both_consumers_read_is_released_by_both(compiler):
    ptx = compiler.run(assembly_of, entry_of(ROLES)).ptx
    counts_two, releases = r"(mbarrier\.init\S* \[%r\d+\], )2;", r"@%p\d+ mbarrier\.arrive\.shared::cta"
    last = [*re.finditer(releases, ptx)][-1]
    planted = {
        "the first frees it": re.sub(counts_two, r"\g<1>1;", ptx),
        "a third is awaited": re.sub(counts_two, r"\g<1>3;", ptx),
        "one never does": ptx[: last.start()] + "//" + ptx[last.start() :],
    }
    assert len(re.findall(counts_two, ptx)) == 4
    assert unordered_roles(Flow.of(ptx)) == ()
    found = {what: unordered_roles(Flow.of(broken)) for what, broken in planted.items()}
    assert found == dict.fromkeys(planted, (NOT_COUNTED,))


def test_blocks_of_mxfp8_that_tensor_cores_do_not_scale_are_told(told):
    """Of fewer than 128 rows Triton makes 16 bits first: the reason that no such tile is shipped."""
    found = told("few_rows_of_mx")
    assert "no UTCQMMA" in found
    assert any("fp8 is converted before it is multiplied" in one for one in found)


def test_one_byte_of_what_quantizes_is_seen(monkeypatch):
    sound = RECORDS["quantize"]
    of = RandomOperands(9, 17, 301, torch.bfloat16)
    case = NumericCase("quantize", partial(scaled.quantized, of))
    assert examine(case, Frames()).failure == ""

    def off_by_one_bit(*call):
        words = sound.by_kernel(*call)
        words.view(torch.uint8)[5, 7] ^= 1
        return words

    monkeypatch.setitem(RECORDS, "quantize", replace(sound, by_kernel=off_by_one_bit))
    assert examine(case, Frames()).failure.startswith("words is off by")


@pytest.mark.parametrize("scales", scaled.SCALES | scaled.MX)
def test_a_scale_of_another_block_is_seen(monkeypatch, scales):
    sound = RECORDS["scaled_linear"]
    of = RandomOperands(40, 141, 301, torch.bfloat16)
    case = NumericCase(
        "scaled_linear", partial(primitive, of, "scaled_linear", **(scaled.SCALES | scaled.MX)[scales])
    )
    assert examine(case, Frames()).failure == ""

    def with_the_scales_of_others(x, weight, x_scale, *rest, **ways):
        return sound.by_kernel(x, weight, x_scale.roll(1, 0), *rest, **ways)

    monkeypatch.setitem(RECORDS, "scaled_linear", replace(sound, by_kernel=with_the_scales_of_others))
    assert "y is off by" in examine(case, Frames()).failure
