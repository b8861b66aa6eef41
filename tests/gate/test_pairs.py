"""What the gate sees of pairs of blocks: in a small kernel in PTX, and in ours where Triton has pairs."""

import re

import pytest

from tests.compiled import assembly_of
from tpkernels.gate.ahead_of_time import facts_of
from tpkernels.gate.catalog import catalog
from tpkernels.gate.disassembly import sass_mix
from tpkernels.gate.expectations import violations
from tpkernels.gate.ptx_flow import Flow
from tpkernels.gate.roles import (
    ENDS_ALONE,
    MADE_ALONE,
    MISCOUNTED,
    NOT_COUNTED,
    NOT_SHARED,
    NOT_TOLD,
    ONE_HEARD,
    unordered_roles,
)
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS, PAIRS_SINCE, triton_version

PAIR = """
.reqntid 128
.reqnctapercluster 2
mov.b32 %r1, global_smem;
add.s32 %r2, %r1, 1024;
add.s32 %r3, %r1, 1032;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 2;
fence.proxy.async.shared::cta;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
$L__BB0_1:
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
mbarrier.try_wait.parity.shared::cta.b64 complete, [%r3], %r5;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
[%r1], [%rd1, {%r6, %r7}], [%r2], %rs1;
mbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], %r5;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd2, %rd3, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 0;
and.b32 %r8, %r3, -16777224;
@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r8];
@%p2 bra $L__BB0_1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ret;
"""
REMOTE = "mbarrier.arrive.shared::cluster.b64 _, [%r8];"
LOCAL = "mbarrier.arrive.shared::cta.b64 _, [%r3];"
FAULTS = {  # what stands there, what stands there instead, what is found
    "counts_one_block": ("[%r3], 2;", "[%r3], 1;", (MISCOUNTED, ONE_HEARD)),
    "told_at_another_barrier": ("%r8, %r3,", "%r8, %r2,", (MISCOUNTED,)),
    "arrives_at_its_own_block": (REMOTE, LOCAL, (NOT_TOLD,)),
    "told_on_one_way_only": ("and.b32", "@%p3 bra $L__BB0_2;\nand.b32", (NOT_TOLD,)),
    "copied_to_one": (".multicast::cluster", "", (NOT_SHARED,)),
    "waits_for_none": ("mbarrier.try_wait.parity.shared::cta.b64 complete, [%r3]", "//", (ONE_HEARD,)),
    "waits_for_its_own": ("complete, [%r3]", "complete, [%r2]", (ONE_HEARD,)),
    "does_not_wait_when_made": ("barrier.cluster.wait.aligned;\n$L", "$L", (MADE_ALONE,)),
    "made_without_a_fence": ("@%p1 fence.mbarrier_init", "//", (MADE_ALONE,)),
    "fenced_when_met": (
        "@%p1 fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.aligned;\n",
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n"
        "@%p1 fence.mbarrier_init.release.cluster;\n",
        (MADE_ALONE,),
    ),
    "ends_alone": ("barrier.cluster.wait.aligned;\nret;", "ret;", (ENDS_ALONE,)),
    "ends_early_on_one_way": ("barrier.cluster.arrive.aligned;", "@%p4 ret;", (ENDS_ALONE,)),
}


def test_a_pair_that_keeps_to_the_rules_passes():
    assert unordered_roles(Flow.of(PAIR)) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_step_between_blocks_is_needed(fault):
    old, new, found = FAULTS[fault]
    assert PAIR.count(old) == 1
    ends = "$L__BB0_2:\nret;\n" if "$L__BB0_2" in new else ""
    broken = PAIR.replace(old, new) + ends
    assert set(unordered_roles(Flow.of(broken))) - ({ENDS_ALONE} if ends else set()) == set(found)


def test_single_blocks_owe_nothing_to_others():
    assert unordered_roles(Flow.of(PAIR.replace(".reqnctapercluster 2", "").replace(REMOTE, LOCAL))) == ()


def test_copies_to_several_blocks_are_counted_apart():
    line = "        /*2130*/                   @UP1 UTMALDG.2D.MULTICAST [UR20], [UR6], UR8 ;\n"
    assert sass_mix(line + line.replace(".MULTICAST", "").replace(", UR8", "")) == {
        "all": 2,
        "UTMALDG": 2,
        "UTMALDG.MULTICAST": 1,
    }


def pairs():
    return [entry for entry in catalog() if "-b2/" in entry.name and entry.architectures == ("sm_90",)]


def test_pairs_are_compiled_where_triton_arrives_at_other_blocks():
    kernels = {entry.name.partition("/")[0] for entry in pairs()}
    everywhere = {"linear", "glu", "dgrad", "dgrad_pairs", "dglu", "wgrad", "scaled_linear"}
    assert kernels == (everywhere if triton_version() >= PAIRS_SINCE else set())


@pytest.mark.skipif(triton_version() < PAIRS_SINCE, reason="pairs of blocks need Triton 3.9")
def test_compiled_pair_keeps_to_the_rules(compiler):
    entry = next(entry for entry in pairs() if "gelu_tanh+bias" in entry.name)
    assert entry.options == {"num_warps": 8, **LAUNCH_OPTIONS, "num_ctas": 2}
    facts = compiler.run(facts_of, entry, "sm_90")
    assert (facts.spills, facts.stack, facts.in_flight, facts.unordered_roles) == (0, 0, 1, ())
    assert (facts.count("UTMALDG"), facts.count("UTMALDG.MULTICAST")) == (2, 1)
    assert list(violations(entry, "sm_90", facts)) == []


@pytest.mark.skipif(triton_version() < PAIRS_SINCE, reason="pairs of blocks need Triton 3.9")
@pytest.mark.parametrize(("kernel", "consumers"), [("linear", 1), ("scaled_linear", 2)])
def test_what_is_planted_in_a_compiled_pair_is_refused(compiler, kernel, consumers):
    entry = next(e for e in pairs() if e.name.startswith(f"{kernel}/") and "gelu_tanh+bias" in e.name)
    ptx = compiler.run(assembly_of, entry).ptx
    arrivals, miscounted = 2 * consumers, {NOT_COUNTED} if consumers == 2 else set()
    uncounted = miscounted | ({ONE_HEARD} if consumers == 2 else set())
    planted = {
        re.sub(r"arrive\.shared::cluster", "arrive.shared::cta", ptx): {NOT_TOLD, *uncounted},
        ptx.replace("barrier.cluster.wait.aligned", "//"): {MADE_ALONE, ENDS_ALONE},
        ptx.replace(".multicast::cluster", ""): {NOT_SHARED},
        re.sub(rf"(init\.shared::cta\.b64 \[%r\d+\], ){arrivals};", rf"\g<1>{consumers};", ptx): {
            MISCOUNTED,
            ONE_HEARD,
            *miscounted,
        },
    }
    assert unordered_roles(Flow.of(ptx)) == ()
    for broken, found in planted.items():
        assert set(unordered_roles(Flow.of(broken))) == found
