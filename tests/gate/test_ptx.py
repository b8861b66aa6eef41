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
PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r7}, %rd6, %rd7, 1, 1, 1, 0, 1;"
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


EPILOGUE = f"{STORE}\n\t{LOAD}\n\t{STORE}"  # of what was there before


def test_only_what_is_multiplied_must_have_arrived():
    """What an epilogue loads between its stores is not; what it loads ahead for the next tile is."""
    multiplies = WAITS.replace(LOAD, f"{LOAD}\n\t{PRODUCT}")
    assert unordered_reads(multiplies) == ()
    assert unordered_reads(multiplies.replace(STORE, EPILOGUE)) == ()
    assert unordered_reads(WAITS.replace(STORE, EPILOGUE)) != ()  # a sum: all that it loads
    ahead = multiplies.replace(STORE, f"{EPILOGUE}\n\t{LOAD}")
    assert any(found.startswith(NO_LOOK) for found in unordered_reads(ahead))


LATE = f"$L__BB0_3:\n\t{LOAD}\n\t{FENCE}"
NO_LOOK, NO_FENCE = "a row is loaded without a look", "a row is loaded without a proxy fence"
START = f"$L__BB0_1:\n\t{STORE}"
NO_COUNT = "a flag is raised without a count"
ONE_GPU, RELAXED = LOOK.replace("sys", "gpu"), LOOK.replace("acquire", "relaxed")
READS = {  # of `WAITS`: what is edited, into what, the fault
    "look": (LOOK, "", NO_LOOK),
    "barrier": ("bar.sync \t0;", "", "a row is loaded without a barrier"),
    "fence": (FENCE, "", NO_FENCE),
    "late_fence": (f"{FENCE}\n$L__BB0_3:", LATE, NO_FENCE),
    "way_around": ("bra.uni \t$L__BB0_2;", "bra.uni \t$L__BB0_3;", NO_LOOK),
    "way_around_a_later_wait": ("@%p7 bra \t$L__BB0_4;", "@%p7 bra \t$L__BB0_3;", NO_LOOK),
    "ahead": (STORE, f"{STORE}\n\t{LOAD}", NO_LOOK),
    "look_of_one_gpu": ("sys.acquire", "gpu.acquire", NO_LOOK),
    "relaxed_look": ("sys.acquire", "sys.relaxed", NO_LOOK),
    "one_more_of_one_gpu": (
        LOOK,
        f"{LOOK}\n\t{ONE_GPU}",
        "an access that orders others does so for this",
    ),
    "another_relaxed": (LOOK, f"{LOOK}\n\t{RELAXED}", "an access for the whole system is relaxed"),
    "fence_of_shared_memory": ("async.global", "async.shared::cta", NO_FENCE),
}
FLAGS = {  # of `PUSHES`
    "gpu": ("sys.release.exch", "gpu.release.exch", NO_FLAG),
    "relaxed": ("sys.release.exch", "sys.relaxed.exch", NO_FLAG),
    "count_gpu": ("sys.acq_rel.add", "gpu.acq_rel.add", NO_COUNT),
    "count_relaxed": ("sys.acq_rel.add", "sys.relaxed.add", NO_COUNT),
    "no_barrier": ("bar.sync \t0;", "", "a flag is raised without a"),
    "late_store": (COUNT, f"{COUNT}\n\t{STORE}", "a flag is raised without a barrier"),
    "early_flag": (START, f"\t{FLAG}\n{START}", "a flag is raised before anything is stored"),
}


@pytest.mark.parametrize(("there", "instead", "fault"), READS.values(), ids=READS)
def test_each_step_before_a_load_is_needed(there, instead, fault):
    assert there in WAITS
    assert any(found.startswith(fault) for found in unordered_reads(WAITS.replace(there, instead)))


@pytest.mark.parametrize(("there", "instead", "fault"), FLAGS.values(), ids=FLAGS)
def test_each_step_before_a_flag_is_needed(there, instead, fault):
    assert there in PUSHES
    assert any(found.startswith(fault) for found in unordered_flags(PUSHES.replace(there, instead)))


def test_pointers_need_no_proxy_fence():
    copied = WAITS.replace(FENCE, "").replace(LOAD, "cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 0x10;")
    assert unordered_reads(copied) == ()
    assert unordered_reads(copied.replace(LOOK, "")) != ()
