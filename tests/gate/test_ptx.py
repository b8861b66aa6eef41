"""What PTX proves of flags: each fault that is edited into sound PTX, written here or compiled, is seen."""

import re

import pytest

from tests.compiled import assembly_of
from tpkernels.gate.catalog import recipes
from tpkernels.gate.ptx import NO_FLAG, unordered_flags, unordered_reads

LOOK = "@%p1 ld.global.sys.acquire.b32 %r1, [ %rd1 + 0 ];"
FENCE = "fence.proxy.async.global; mov.u32 %r2, 0;"
LOAD = "@%p3 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier [%r3], [%rd2, {%r4, %r5}], [%r6];"
COUNT = "@%p1 atom.global.sys.acq_rel.add.u32 %r1, [ %rd3 + 0 ], %r2;"
FLAG = "@%p1 atom.global.sys.release.exch.b32 %r3, [ %rd4 + 0 ], %r4;"
STORE = "@%p2 st.global.v4.b32 [ %rd5 + 0 ], { %r1, %r2, %r3, %r4 };"
# blocks lie in another order than they run in: the store that ends a tile comes first
WAITS = f"""
	bra.uni 	$L__BB0_2;
$L__BB0_1:                              // the end of a tile
	{STORE}
	@%p7 bra 	$L__BB0_4;
$L__BB0_2:                              // the next one
	{LOOK}
	@%p8 bra 	$L__BB0_2;
	bar.sync 	0;
	{FENCE}
$L__BB0_3:                              // along its depth
	{LOAD}
	@%p9 bra 	$L__BB0_3;
	bra.uni 	$L__BB0_1;
$L__BB0_4:
	ret;
"""
PUSHES = f"""
$L__BB0_1:
	{STORE}
	{STORE}
	bar.sync 	0;
	{COUNT}
	@%p6 bra 	$L__BB0_2;
	atom.global.gpu.relaxed.exch.b32 %r9, [ %rd3 + 0 ], %r8;
	{FLAG}
$L__BB0_2:
	@%p7 bra 	$L__BB0_1;
	ret;
"""


def test_what_is_in_order_is_seen_to_be():
    assert (unordered_reads(WAITS), unordered_flags(PUSHES)) == ((), ())
    assert unordered_reads("ret;") == ("no load of rows that is known",)
    assert unordered_flags(WAITS) == (NO_FLAG,)


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        (LOOK, "", "a row is loaded without a look"),
        ("bar.sync \t0;", "", "a row is loaded without a barrier"),
        (FENCE, "", "a row is loaded without a proxy fence"),
        (f"{FENCE}\n$L__BB0_3:", f"$L__BB0_3:\n\t{LOAD}\n\t{FENCE}", "a row is loaded without a proxy fence"),
        ("bra.uni \t$L__BB0_2;", "bra.uni \t$L__BB0_3;", "a row is loaded without a look"),
        ("@%p7 bra \t$L__BB0_4;", "@%p7 bra \t$L__BB0_3;", "a row is loaded without a look"),
        (STORE, f"{STORE}\n\t{LOAD}", "a row is loaded without a look"),
    ],
    ids=["look", "barrier", "fence", "late_fence", "way_around", "way_around_a_later_wait", "ahead"],
)
def test_each_step_before_a_load_is_needed(there, instead, fault):
    assert there in WAITS
    assert any(found.startswith(fault) for found in unordered_reads(WAITS.replace(there, instead)))


def test_pointers_need_no_proxy_fence():
    copied = WAITS.replace(FENCE, "").replace(LOAD, "cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 0x10;")
    assert unordered_reads(copied) == ()
    assert unordered_reads(copied.replace(LOOK, "")) != ()


KERNELS = {
    "waits": "gather_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/depth_first",
    "pushes": "scatter_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/two+depth_first",
}


@pytest.fixture(scope="module")
def compiled(compiler) -> dict[str, str]:
    """The PTX of both kernels."""
    return {
        kernel: compiler.run(assembly_of, recipes()[name].entry()).ptx for kernel, name in KERNELS.items()
    }


def edited(ptx: str, pattern: str, instead: str, count: int = 0) -> str:
    changed, times = re.subn(pattern, instead, ptx, count=count, flags=re.MULTILINE)
    assert times, f"no {pattern}"
    return changed


def test_compiled_kernels_are_in_order(compiled):
    assert unordered_reads(compiled["waits"]) == ()
    assert unordered_flags(compiled["pushes"]) == ()
    assert len(re.findall(r"ld\.global\.sys\.acquire", compiled["waits"])) == 2  # at first, and spinning


SPIN = r"ld\.global\.sys\.acquire"
PROXY = r"fence\.proxy\.async\.global"


@pytest.mark.parametrize(
    ("pattern", "instead", "count", "fault"),
    [
        (SPIN, "ld.global.gpu.acquire", 0, "a row is loaded without a look"),
        (SPIN, "ld.global.gpu.acquire", 1, "an access that orders others does so for this GPU alone"),
        (SPIN, "ld.global.sys.relaxed", 0, "a row is loaded without a look"),
        (SPIN, "ld.global.sys.relaxed", 1, "an access for the whole system is relaxed"),
        (PROXY + ";", "", 0, "a row is loaded without a proxy fence"),
        (PROXY, "fence.proxy.async.shared::cta", 0, "a row is loaded without a proxy fence"),
        (r"bar\.sync\s+0;", "", 0, "a row is loaded without a barrier"),
    ],
    ids=["gpu", "one_gpu", "relaxed", "one_relaxed", "no_fence", "fence_of_shared_memory", "no_barrier"],
)
def test_faults_of_a_compiled_wait_are_seen(compiled, pattern, instead, count, fault):
    found = unordered_reads(edited(compiled["waits"], pattern, instead, count))
    assert any(words.startswith(fault) for words in found), found


BARRIER_THEN_COUNT = r"^\s*bar\.sync\s+0;(.*\n(?:.*\n){0,8}?.*sys\.acq_rel\.add.*\n)"


@pytest.mark.parametrize(
    ("pattern", "instead", "fault"),
    [
        (r"sys\.release\.exch", "gpu.release.exch", NO_FLAG),
        (r"sys\.release\.exch", "sys.relaxed.exch", NO_FLAG),
        (r"sys\.acq_rel\.add", "gpu.acq_rel.add", "a flag is raised without a count"),
        (r"sys\.acq_rel\.add", "sys.relaxed.add", "a flag is raised without a count"),
        (BARRIER_THEN_COUNT, r"\1", "a flag is raised without a"),
        (r"(^.*sys\.acq_rel\.add.*\n)", rf"\1{STORE}\n", "a flag is raised without a count"),
        (r"(^.*st\.global\.v4)", rf"{FLAG}\n\1", "a flag is raised before anything is stored"),
    ],
    ids=["gpu", "relaxed", "count_gpu", "count_relaxed", "no_barrier", "late_store", "early_flag"],
)
def test_faults_of_a_compiled_push_are_seen(compiled, pattern, instead, fault):
    found = unordered_flags(edited(compiled["pushes"], pattern, instead))
    assert any(words.startswith(fault) for words in found), found
