"""What the gate reads of pairs that multiply together: in a small kernel in PTX, and in ours."""

import re

import pytest

from tests.compiled import assembly_of
from tpkernels.gate.ahead_of_time import facts_of
from tpkernels.gate.catalog import catalog
from tpkernels.gate.disassembly import sass_mix
from tpkernels.gate.expectations import kernel_of, violations
from tpkernels.gate.ptx_flow import Flow
from tpkernels.gate.roles import (
    ENDS_ALONE,
    FREED_EARLY,
    MULTIPLIES_ALONE,
    NOT_DONE,
    NOT_FREED,
    NOT_READ,
    NOT_TOLD,
    UNTOLD,
    unordered_roles,
)
from tpkernels.kernels.triton_versions import PAIRS_SINCE, triton_version

PAIR = """
.reqntid 128
.reqnctapercluster 2
mov.b32 %r1, global_smem;
@%p1 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 512;
bar.sync 0;
ld.shared.b32 %r9, [global_smem];
bar.sync 0;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
add.s32 %r2, %r1, 1024;
add.s32 %r3, %r1, 1032;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 2;
fence.proxy.async.shared::cta;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
bar.sync 0;
$L__BB0_1:
mbarrier.try_wait.parity.shared::cta.b64 complete, [%r3], %r5;
@%p3 tcgen05.mma.cta_group::2.kind::f16 [ %r9 + 0 ], %rd1, %rd2, %r6, %p4;
@%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %rs1;
mbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], %r5;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {%r10}, [%r9];
tcgen05.wait::ld.sync.aligned;
st.shared.b32 [%r1], %r10;
fence.proxy.async.shared::cta;
bar.sync 0;
and.b32 %r8, %r3, -16777224;
@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r8];
@%p2 bra $L__BB0_1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@%p1 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r9, 512;
ret;
"""
FAULTS = {  # what stands there, what stands there instead, what is found
    "never_freed": ("@%p1 tcgen05.dealloc", "// ", (NOT_FREED,)),
    "not_freed_on_one_way": ("barrier.cluster.arrive.aligned;\n", "@%p5 ret;\n", (NOT_FREED, ENDS_ALONE)),
    "freed_alone": ("barrier.cluster.wait.aligned;\n@%p1 tcgen05", "@%p1 tcgen05", (FREED_EARLY, ENDS_ALONE)),
    "told_to_one_block": (".multicast::cluster", "", (NOT_TOLD,)),
    "told_to_none": ("@%p3 tcgen05.commit", "// ", (UNTOLD,)),
    "product_of_one_block": ("tcgen05.mma.cta_group::2", "tcgen05.mma.cta_group::1", (MULTIPLIES_ALONE,)),
    "memory_of_one_block": ("tcgen05.alloc.cta_group::2", "tcgen05.alloc.cta_group::1", (MULTIPLIES_ALONE,)),
    "given_back_by_the_first_warp": ("cta;\nbar.sync 0;\nand", "cta;\nand", (NOT_READ,)),
    "staged_before_it_is_read": ("tcgen05.wait::ld.sync.aligned;\nst", "st", (NOT_READ, NOT_DONE)),
}


def test_a_pair_that_keeps_to_the_rules_passes():
    assert unordered_roles(Flow.of(PAIR)) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_step_is_needed(fault):
    old, new, found = FAULTS[fault]
    assert PAIR.count(old) == 1
    assert set(unordered_roles(Flow.of(PAIR.replace(old, new)))) == set(found)


def test_products_of_two_blocks_are_counted_apart():
    line = (
        "        /*6030*/                   UTCHMMA.2CTA gdesc[UR16], gdesc[UR18], tmem[UR32], tmem[UR14] ;\n"
    )
    assert sass_mix(line + line.replace(".2CTA", "")) == {"all": 2, "UTCHMMA": 2, "UTCHMMA.2CTA": 1}


def pairs():
    return [entry for entry in catalog() if "-b2/" in entry.name and entry.architectures == ("sm_100",)]


def test_pairs_on_blackwell_are_listed_where_triton_has_them():
    everywhere = {"linear", "glu", "dgrad", "dgrad_pairs", "dglu", "wgrad"}
    assert {kernel_of(entry) for entry in pairs()} == (
        everywhere if triton_version() >= PAIRS_SINCE else set()
    )


@pytest.mark.skipif(triton_version() < PAIRS_SINCE, reason="pairs of blocks need Triton 3.9")
def test_compiled_pair_keeps_to_the_rules(compiler):
    entry = next(entry for entry in pairs() if "gelu_tanh+bias" in entry.name)
    facts = compiler.run(facts_of, entry, "sm_100")
    assert (facts.spills, facts.stack, facts.unordered_roles) == (0, 0, ())
    assert facts.count("UTCHMMA") == facts.count("UTCHMMA.2CTA") == 4
    assert list(violations(entry, "sm_100", facts)) == []


@pytest.mark.skipif(triton_version() < PAIRS_SINCE, reason="pairs of blocks need Triton 3.9")
def test_what_is_planted_in_a_compiled_pair_is_refused(compiler):
    entry = next(entry for entry in pairs() if "gelu_tanh+bias" in entry.name)
    ptx = compiler.run(assembly_of, entry, "sm_100").ptx
    planted = {
        re.sub(r"@%p\d+ tcgen05\.dealloc", "//", ptx): {NOT_FREED},
        re.sub(r"@%p\d+ tcgen05\.commit", "//", ptx): {UNTOLD},
        ptx.replace(".multicast::cluster", ""): {NOT_TOLD},
        ptx.replace("barrier.cluster.wait.aligned", "//"): {FREED_EARLY},
        ptx.replace("tcgen05.mma.cta_group::2", "tcgen05.mma.cta_group::1"): {MULTIPLIES_ALONE},
        ptx.replace("bar.sync \t0, 256;", ""): {NOT_READ},
    }
    assert unordered_roles(Flow.of(ptx)) == ()
    for broken, found in planted.items():
        assert broken != ptx
        assert found <= set(unordered_roles(Flow.of(broken)))
