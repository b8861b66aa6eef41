"""What is read of a kernel between its products, from PTX written here, and what edits of it change."""

from tpkernels.gate import epilogue
from tpkernels.gate.ptx_flow import Flow
from tpkernels.gate.roles import LEFT, STILL_READ, unordered_roles

LOAD = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r5, %r6}]"
)
SPIN = "mbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], %r7;"
STORE = "@%p2 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {%r5, %r6}], [%r3];"
STAGE = f"""st.shared.v4.b32 [%r9], {{%r10, %r11, %r12, %r13}};
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	{STORE}
	cp.async.bulk.commit_group;"""
WAIT = f"""{{
	.reg .pred complete;
	waitLoop:
	{SPIN}
	@!complete bra.uni waitLoop;
}}"""
READ = "cp.async.bulk.wait_group.read 	0;\n\tbar.sync 	0;"
PTX = f"""
.reqntid 256
	mov.b32 	%r1, global_smem;
	add.s32 	%r2, %r1, 8192;
	add.s32 	%r3, %r1, 16384;
	@%p5 bra 	$L__BB0_9;
	bra.uni 	$L__BB0_2;
$L__BB0_3:                              // after a tile's products
	wgmma.wait_group.sync.aligned 	0;
	{LOAD}, [%r2];
	{WAIT}
	{READ}
	{STAGE}
	add.s32 	%r8, %r1, 8192;
	{LOAD}, [%r8];
	{WAIT}
	{READ}
	{STAGE}
	@%p3 bra 	$L__BB0_8;
$L__BB0_2:                              // a tile
	add.s32 	%r20, %r20, 8;
	@%p4 bra 	$L__BB0_3;
$L__BB0_1:                              // along its depth
	{WAIT.replace("%r2]", "%r20]")}
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{%r30, %r31}}, %rd3, %rd4, %p6, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 	1;
	{LOAD}, [%r21];
	@%p7 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_3;
$L__BB0_9:                              // nothing to multiply
	{LOAD}, [%r2];
	{WAIT}
$L__BB0_8:
	cp.async.bulk.wait_group.read 	0;
	ret;
"""


def flow(*edits: tuple[str, str], count: int = -1) -> Flow:
    ptx = PTX
    for there, instead in edits:
        assert there in ptx
        ptx = ptx.replace(there, instead, count)
    return Flow.of(ptx)


def test_waits_for_what_was_just_loaded_are_exposed():
    assert epilogue.exposed_waits(flow()) == 2  # by whatever name the barrier goes, and not without products
    later = f"$L__BB0_1:\n\t{LOAD}, [%r2];\n"
    assert epilogue.exposed_waits(flow((f"{LOAD}, [%r2];", ""))) == 1
    assert epilogue.exposed_waits(flow((f"{LOAD}, [%r2];", ""), ("$L__BB0_1:", later), count=1)) == 1
    assert epilogue.exposed_waits(flow((f"{LOAD}, [%r21];", f"{LOAD}, [%r20];"))) == 3  # in the main loop too


def test_stores_are_serial_and_alone_unless_waits_are_left_out():
    assert epilogue.serial_stores(flow()) == 1  # of two: products lie between the second and the next tile's
    assert epilogue.serial_stores(flow(("wait_group.read 	0", "wait_group.read 	1"))) == 0
    assert not epilogue.products_during_stores(flow())
    assert epilogue.products_during_stores(flow(("wgmma.wait_group.sync.aligned 	0;", "")))
    assert [role.threads for role in flow().roles] == [256]
    assert not epilogue.loads_during_stores(flow())
    assert epilogue.role_registers(flow()) == ()


def test_a_buffer_is_known_by_its_address_and_copies_of_it_are_counted():
    assert unordered_roles(flow()) == ()
    assert unordered_roles(flow((READ, ""))) == (STILL_READ,)
    assert unordered_roles(flow(("$L__BB0_8:\n\tcp.async.bulk.wait_group.read", "$L__BB0_8:\n\tnop"))) == (
        LEFT,
    )
    assert unordered_roles(flow(("wait_group.read 	0", "wait_group.read 	1"))) == (STILL_READ,)
    other = PTX.replace(STORE, STORE.replace("%r3", "%r14"), 1).replace(
        "	@%p5 bra", "	add.s32 %r14, %r1, 0;\n@%p5 bra"
    )
    assert unordered_roles(Flow.of(other.replace("wait_group.read 	0", "wait_group.read 	1", 2))) == ()
    assert unordered_roles(Flow.of(other.replace(READ, ""))) == (STILL_READ,)


def test_a_wait_until_copies_have_written_is_one_until_they_have_read():
    """With which Triton ends a kernel since 3.8, and stages again where a kernel has atomics."""
    assert unordered_roles(flow(("wait_group.read", "wait_group"))) == ()
    assert (
        unordered_roles(
            flow(("$L__BB0_8:\n\tcp.async.bulk.wait_group.read", "$L__BB0_8:\n\tcp.async.bulk.wait_group"))
        )
        == ()
    )
    assert unordered_roles(flow(("wait_group.read 	0", "wait_group 	1"))) == (STILL_READ,)
    assert epilogue.serial_stores(flow(("wait_group.read", "wait_group"))) == epilogue.serial_stores(flow())


def test_a_register_that_may_change_is_not_an_address_of_a_buffer():
    value = Flow.of(
        "mov.b32 %r1, 8;\nadd.s32 %r2, %r1, 8;\nadd.s32 %r3, %r1, 8;\nmov.b32 %r4, 8;\n@%p1 mov.b32 %r4, 9;\n"
        "add.s32 %r5, %r4, 8;\nld.shared.b32 %r6, [%r1];\nmov.b32 %r7, 8;\n@%p1 ld.global.b32 {%r7}, [%rd1];"
    ).value
    assert value("%r2") == value("%r3") != value("%r1")
    assert all(isinstance(value(register), int) for register in ("%r1", "%r2"))
    assert [value(register) for register in ("%r4", "%r5", "%r6", "%r7", "%r8")] == [
        *("%r4", "%r5", "%r6", "%r7", "%r8")
    ]
