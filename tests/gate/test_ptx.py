"""What PTX proves of flags: each fault that is edited into sound PTX, written here, is seen.

That compiled kernels are in order is asked in `test_ahead_of_time`.
"""

import pytest

from tpkernels.gate.ptx_flow import NO_FLAG, unordered_flags, unordered_reads

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


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        ("sys.acquire", "gpu.acquire", "a row is loaded without a look"),
        ("sys.acquire", "sys.relaxed", "a row is loaded without a look"),
        (
            LOOK,
            f"{LOOK}\n\t{LOOK.replace('sys', 'gpu')}",
            "an access that orders others does so for this GPU",
        ),
        (
            LOOK,
            f"{LOOK}\n\t{LOOK.replace('acquire', 'relaxed')}",
            "an access for the whole system is relaxed",
        ),
        ("async.global", "async.shared::cta", "a row is loaded without a proxy fence"),
    ],
    ids=["gpu", "relaxed", "one_gpu", "one_relaxed", "fence_of_shared_memory"],
)
def test_a_look_orders_the_whole_system(there, instead, fault):
    assert any(found.startswith(fault) for found in unordered_reads(WAITS.replace(there, instead)))


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        ("sys.release.exch", "gpu.release.exch", NO_FLAG),
        ("sys.release.exch", "sys.relaxed.exch", NO_FLAG),
        ("sys.acq_rel.add", "gpu.acq_rel.add", "a flag is raised without a count"),
        ("sys.acq_rel.add", "sys.relaxed.add", "a flag is raised without a count"),
        ("bar.sync \t0;", "", "a flag is raised without a"),
        (COUNT, f"{COUNT}\n\t{STORE}", "a flag is raised without a barrier"),
        (
            f"$L__BB0_1:\n\t{STORE}",
            f"\t{FLAG}\n$L__BB0_1:\n\t{STORE}",
            "a flag is raised before anything is stored",
        ),
    ],
    ids=["gpu", "relaxed", "count_gpu", "count_relaxed", "no_barrier", "late_store", "early_flag"],
)
def test_each_step_before_a_flag_is_needed(there, instead, fault):
    assert there in PUSHES
    found = unordered_flags(PUSHES.replace(there, instead))
    assert any(words.startswith(fault) for words in found), found
