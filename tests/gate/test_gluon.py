"""What the gate sees of warp-specialised kernels, by the example of `dglu`. Gluon needs Triton 3.7."""

import re
from dataclasses import replace

import pytest

from tests.compiled import assembly_of
from tests.gate.test_expectations import FACTS
from tpkernels.gate.ahead_of_time import Entry, Facts, facts_of
from tpkernels.gate.catalog import catalog
from tpkernels.gate.epilogue import role_registers
from tpkernels.gate.expectations import violations
from tpkernels.gate.ptx_flow import PRODUCT, TENSOR_LOAD, Flow
from tpkernels.gate.recording import HAS_GLUON
from tpkernels.gate.roles import (
    ADDED_AND_STORED,
    ADDED_TWICE,
    BY_ALL,
    IN_FLIGHT,
    LEFT,
    LOADED,
    MADE_AGAIN,
    MADE_LATE,
    NOT_DONE,
    NOT_FENCED,
    NOT_MADE,
    NOT_READ,
    NOT_STAGED,
    OVERLAID,
    STILL_READ,
    unordered_roles,
)
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="Gluon is of another form before Triton 3.7")


def in_roles(kernel: str) -> list[Entry]:
    """The entry with the costliest epilogue of each tile that is in roles."""
    named = [entry for entry in catalog() if re.match(rf"{kernel}/.*-c\d/", entry.name)]
    return [*{entry.name.rpartition("/")[0]: entry for entry in reversed(named)}.values()]


def together() -> Entry:
    """The entry whose consumers compute a tile together; a role loads operands, another one inputs."""
    return next(entry for entry in in_roles("dglu") if "-c1/" in entry.name)


@pytest.fixture(scope="module")
def facts(compiler) -> Facts:
    return compiler.run(facts_of, together(), "sm_90")


@pytest.fixture(scope="module")
def ptx(compiler) -> str:
    return compiler.run(assembly_of, together()).ptx


def test_gluon_kernel_is_recorded_and_compiled(facts):
    entry = together()
    assert (entry.form, entry.options) == ("descriptor", {"num_warps": 8, **LAUNCH_OPTIONS})
    assert entry.arguments["a"] == (
        "tensordesc<bf16[128, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, "
        "transposed=False, fp4_padded=False, cga_layout=[])>"
    )
    assert (facts.spills, facts.stack, facts.in_flight, facts.narrow_offsets) == (0, 0, 1, ())
    assert facts.aligned == entry.aligned
    assert 3 * (128 + 256) * 64 * 2 < facts.shared < 232_448
    assert all(facts.count(name) for name in ("HGMMA", "UTMALDG", "UTMASTG"))
    assert [*violations(entry, "sm_90", facts)] == []


def test_registers_of_roles_and_threads_with_those_that_fill_one_up(facts):
    assert facts.role_registers == (240, 24, 24)
    assert (facts.threads, facts.registers) == (12 * 32, 168)  # two roles of one warp take the room of four
    assert facts.blocks == 1


def test_what_another_role_loads_is_not_exposed(compiler):
    assert len(in_roles("dglu")) == 2
    for entry in in_roles("dglu"):
        facts = compiler.run(facts_of, entry, "sm_90")
        assert (facts.exposed_waits, facts.serial_stores, facts.unordered_roles) == (0, 0, ())
        assert (facts.loads_during_stores, facts.products_during_stores) == (True, "-c2/" in entry.name)


def test_roles_are_told_apart(ptx):
    roles = Flow.of(ptx).roles
    assert [role.threads for role in roles] == [256, 32, 32]
    assert [len(role.matching(PRODUCT)) for role in roles] == [4, 0, 0]
    assert [len(role.matching(TENSOR_LOAD)) for role in roles] == [0, 5, 2]  # a weight is four boxes wide


def test_roles_are_told_apart_by_comparisons_too(ptx):
    """As Triton sends few of them on their ways since 3.8, instead of by a table."""
    table = re.search(
        r"\t(\$L_brx_0): \.branchtargets\n((?:.*,\n)*.*;)\n\tbrx\.idx \t(%r\d+), \$L_brx_0;", ptx
    )
    if table is None:
        pytest.skip("this Triton writes these comparisons itself")
    targets = re.findall(r"\$L__BB\w+", table[2])
    chain = "\n".join(
        f"\tsetp.eq.b32 \t%p{900 + n}, {table[3]}, {n};\n\t@%p{900 + n} bra \t{target};"
        for n, target in enumerate(targets)
    )
    elsewhere = re.sub(r"\$L_brx_0: \.branchtargets\n((?:.*,\n)*.*;)", "", ptx).replace("$L_brx_0", "JTI0_0")
    elsewhere = elsewhere.replace(
        "{\n", f"{{\nJTI0_0:\n\t.branchtargets\n{table[2]}\n", 1
    )  # as in Triton 3.9
    assert [role.threads for role in Flow.of(elsewhere).roles] == [256, 32, 32]
    compared = Flow.of(ptx.replace(table[0], f"{chain}\n\tbarrier.sync \t1;\n\tbarrier.sync \t1;\n\tret;"))
    assert [role.threads for role in compared.roles] == [256, 32, 32]
    assert [len(role.matching(TENSOR_LOAD)) for role in compared.roles] == [0, 5, 2]
    assert role_registers(compared) == role_registers(Flow.of(ptx)) == (240, 24, 24)
    assert unordered_roles(compared) == ()
    assert unordered_roles(Flow.of("\n".join(compared.lines).replace("bar.sync \t0, 256;", ""))) != ()


BARRIER = r"\tbar\.sync \t0, 256;\n"
FENCE = r"fence\.proxy\.async\.shared::cta;"
MADE = r"@%p\d+ mbarrier\.init\.shared::cta\.b64 \[%r\d+\], 1;"
PLACE, THEN_MADE = r"(add\.s32 \t%r\d+, %r\d+, )", r"(?=(?:.*\n){0,2}\t@%p\d+ mbarrier\.init)"
ARRIVES = r"(?=(?:.*\n){0,3}\t@%p\d+ mbarrier\.arrive\.shared)"
FAULTS = {  # pattern, what stands there instead, which of the places, what is found
    "released_in_the_loop_by_the_first_warp": (BARRIER + ARRIVES, "", -1, NOT_READ),
    "released_after_the_loop_by_the_first_warp": (BARRIER + ARRIVES, "", 0, NOT_READ),
    "released_by_the_first_warp_that_read_an_input": (BARRIER + ARRIVES, "", 1, NOT_READ),
    "released_under_two_products": (r"wgmma\.wait_group\.sync\.aligned 1;", "", 0, IN_FLIGHT),
    "released_under_two_that_are_waited_for": (r"(?<=wait_group\.sync\.aligned )1;", "2;", 0, IN_FLIGHT),
    "staged_under_products": (r"wgmma\.wait_group\.sync\.aligned \t?0;", "", 0, NOT_DONE),
    "no_fence": (FENCE, "", 2, NOT_FENCED),
    "fence_of_other_memory": (FENCE, "fence.proxy.async.global;", 2, NOT_FENCED),
    "released_without_a_fence": (FENCE, "", 1, LOADED),
    "fenced_when_others_may_still_read": (
        FENCE + r"\n((?:.*\n)*?)" + BARRIER,
        r"\1\tbar.sync \t0, 256;\n\tfence.proxy.async.shared::cta;\n",
        1,
        LOADED,
    ),
    "copied_by_the_first_warp_that_staged": (BARRIER + r"(?=(?:.*\n){0,5}.*elect\.sync)", "", 0, NOT_STAGED),
    "copied_by_all": (r"@%p\d+ (?=cp\.async\.bulk\.tensor\.2d\.global)", "", 0, BY_ALL),
    "staged_without_a_wait": (r"cp\.async\.bulk\.wait_group\.read \t1;", "", 0, STILL_READ),
    "staged_by_the_first_warp_that_waited": (r"(?<=read \t1;\n)" + BARRIER, "", 0, STILL_READ),
    "waited_when_staged": (
        r"cp\.async\.bulk\.wait_group\.read \t1;((?:.*\n)*?)(?=.*fence\.proxy)",
        r"\1cp.async.bulk.wait_group.read \t1;\n\tbar.sync \t0, 256;\n",
        0,
        STILL_READ,
    ),
    "roles_begin_unawares": (r"barrier\.sync \t1;", "", ..., NOT_MADE),
    "made_without_the_copy_engine": (FENCE, "", 0, NOT_MADE),
    "made_again": (MADE, r"\g<0>\n\g<0>", 3, MADE_AGAIN),
    "made_over_another": (PLACE + "([0-9]+)([08]);" + THEN_MADE, r"\g<1>\g<2>4;", 1, MADE_AGAIN),
    "left_under_a_copy": (r"cp\.async\.bulk\.wait_group\.read \t0;", "", 0, LEFT),
    "made_late": (
        r"(?<=barrier\.sync \t1;\n)",
        "@%p11 mbarrier.init.shared::cta.b64 [global_smem+240000], 1;\nfence.proxy.async.shared::cta;\n",
        0,
        MADE_LATE,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_step_between_warps_is_needed(ptx, fault):
    pattern, instead, which, found = FAULTS[fault]
    places = [*re.finditer(pattern, ptx)]
    for place in reversed(places if which is ... else [places[which]]):
        ptx = ptx[: place.start()] + place.expand(instead) + ptx[place.end() :]
    assert unordered_roles(Flow.of(ptx)) == (found,)


@pytest.fixture(scope="module")
def adding(compiler) -> str:
    """The PTX of an entry whose results the copy engine adds to main_grad."""
    entry = next(entry for entry in catalog() if re.match(r"wgrad/.*-c1/\+=fp32", entry.name))
    facts = compiler.run(facts_of, entry, "sm_90")
    assert [*violations(entry, "sm_90", facts)] == []
    more = replace(facts, instructions={**facts.instructions, "UTMAREDG": 16})
    assert [*violations(entry, "sm_90", more)] == ["16 UTMAREDG, expected 8: a sum is added once"]
    return compiler.run(assembly_of, entry).ptx


ADD = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add\.bulk_group"
OF_ADDS = {  # pattern, what stands there instead, what is found
    "twice": (rf"(@%p\d+ {ADD} .*;)", r"\1\n\1", ADDED_TWICE),
    "one_stored": (ADD, "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", ADDED_AND_STORED),
    "by_all": (rf"@%p\d+ (?={ADD})", "", BY_ALL),
    "staged_under_one": (r"cp\.async\.bulk\.wait_group\.read \t1;", "", STILL_READ),
}


@pytest.mark.parametrize("fault", OF_ADDS)
def test_sums_are_added_once(adding, fault):
    assert unordered_roles(Flow.of(adding)) == ()
    pattern, instead, found = OF_ADDS[fault]
    broken, count = re.subn(pattern, instead, adding, count=1)
    assert count == 1
    assert unordered_roles(Flow.of(broken)) == (found,)


def test_a_barrier_may_be_made_again_once_it_was_ended(ptx):
    made = re.search(MADE, ptx)
    ended = made[0].replace(".init", ".inval").replace(", 1;", ";")
    again = ptx.replace(made[0], f"{made[0]}\n{ended}\n{made[0]}", 1)
    assert again.count(made[0]) == 2
    assert unordered_roles(Flow.of(again)) == ()


def test_a_barrier_has_its_memory_to_itself(ptx):
    """Not where a thread stages results, which no constant says, nor where another role's copies land."""
    place = re.search(PLACE + "([0-9]+);" + THEN_MADE, ptx)
    store = re.search(r"bulk\.tensor\.2d\.global\S* \[.*\], \[(%r\d+)\];", ptx)
    staging = int(re.search(rf"add\.s32 \t{store[1]}, %r\d+, ([0-9]+);", ptx)[1])
    for within, found in ((staging + 1000, (OVERLAID,)), (0, (OVERLAID,)), (int(place[2]) + 10_000, ())):
        moved = f"{ptx[: place.start(2)]}{within}{ptx[place.end(2) :]}"
        assert unordered_roles(Flow.of(moved)) == found, within


def test_products_in_roles_have_one_binary_for_all_sizes():
    """So what a trial has run is what runs."""
    sizes = {"rows", "cols", "depth", "depth2", "stride_vector", "vector_ptr"}
    entries = in_roles("dgrad")
    assert len(entries) == 2
    facts = replace(FACTS, aligned=frozenset())
    for entry in entries:
        assert entry.unspecialised == sizes
        assert not sizes & (entry.aligned | entry.constants.keys())
        assert not any("alignment" in one for one in violations(entry, "sm_90", facts))
        specialised = replace(entry, unspecialised=frozenset())
        assert "16-byte alignment lost: cols, depth, depth2, rows, stride_vector, vector_ptr" in violations(
            specialised, "sm_90", facts
        )
