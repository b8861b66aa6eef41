"""The clock's SM on programs whose cycles follow from its constants."""

from dataclasses import replace

import pytest

from tests.gate.clock.assembler import MACHINE, Assembly, SmLaunch, ring, timed
from tpkernels.gate.clock import effects
from tpkernels.gate.clock.faults import UnknownBox

PRODUCT = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"


def test_two_warps_take_turns_on_one_pipe():
    program = Assembly()
    for _ in range(100):
        program("MUFU.TANH R0, R1")
    program.end()
    alone = timed(program)
    together = timed(program, SmLaunch(warps=5))  # warps 0 and 4 share a scheduler
    assert alone.cycles == pytest.approx(100 * 8, abs=10)
    assert together.cycles == pytest.approx(200 * 8, abs=10)
    assert together.stalls[0]["xu"] == pytest.approx(100 * 15, rel=0.02)


def test_a_scheduler_issues_one_instruction_a_cycle():
    program = Assembly()
    for _ in range(100):
        program("FFMA R0, R1, R2, R3")
    program.end()
    assert timed(program, SmLaunch(warps=4)).cycles == pytest.approx(100, abs=3)
    assert timed(program, SmLaunch(warps=16)).cycles == pytest.approx(400, abs=6)


def test_a_fence_waits_until_what_was_stored_is_seen_by_whom_it_is_for():
    cycles = {}
    for scope in ("CTA", "GPU", "SYS"):
        program = Assembly()
        program("STG [R2], R0", effects.Global(96_000, 3_000, store=True, shared=False))
        program(f"MEMBAR.ALL.{scope}")
        program.end()
        cycles[scope] = timed(program).cycles
    drained = 96_000 / MACHINE.store
    assert cycles["CTA"] < 50  # memory that the block shares answers in order
    assert cycles["GPU"] == pytest.approx(drained + MACHINE.gpu_fence, abs=10)
    assert cycles["SYS"] == pytest.approx(drained + MACHINE.system_fence, abs=10)


def test_loads_come_behind_stores_in_an_sms_share_of_memory():
    """16,000 bytes each at 10 a cycle; L2 alone would have sent the load in 400 cycles."""
    program = Assembly()
    program("STG [R2], R0", effects.Global(16_000, 500, store=True, shared=False))
    program("LDG R4, [R2]", effects.Global(16_000, 500, store=False, shared=False), writes=0)
    program("FADD R5, R4, R4", waits=(0,))
    program.end()
    assert timed(program).cycles == pytest.approx(400 + MACHINE.load_latency, abs=60)
    shared = timed(program, machine=replace(MACHINE, memory=10.0))
    assert shared.cycles == pytest.approx(3_200 + MACHINE.load_latency, abs=60)


def test_products_run_at_the_peak_when_their_operands_are_there():
    program = Assembly()
    for _ in range(32):
        program(PRODUCT)
    program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    program.end()
    one = timed(program, SmLaunch(warps=4))
    assert one.cycles == pytest.approx(32 * 128 + MACHINE.drain, abs=20)
    assert one.tensor == 32 * 128
    two = timed(program, SmLaunch(warps=8))
    assert two.cycles == pytest.approx(64 * 128 + MACHINE.drain, abs=20)


def test_a_product_of_fp8_is_twice_as_deep_in_the_same_cycles():
    program = Assembly()
    for _ in range(32):
        program("QGMMA.64x128x32.F32.E4M3.E5M2 R24, gdesc[UR8], R24, gsb0")
    program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    program.end()
    found = timed(program, SmLaunch(warps=4))
    assert found.tensor == 32 * 64  # 8,192 operations a cycle
    # shared memory: a product's operands, and beside it copies that may land
    assert found.cycles == pytest.approx(32 * 64 + MACHINE.drain, abs=20)


def test_a_product_starts_when_all_four_warps_of_its_group_have_issued_it():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0, warps=[2])
    program(PRODUCT, waits=(0,))
    program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    program.end()
    found = timed(program, SmLaunch(warps=4))
    assert found.cycles == pytest.approx(550 + 128 + MACHINE.drain, abs=20)
    assert found.stalls[0]["products"] == pytest.approx(550 + 128 + MACHINE.drain, abs=30)


@pytest.mark.parametrize(("size", "step"), [(20_000, 4 * 128), (40_000, 1000)], ids=["products", "copies"])
def test_a_ring_that_is_deep_enough_is_bound_by_the_slower_side(size, step):
    few, many = (timed(*ring(4, steps, size)).cycles for steps in (20, 60))
    assert (many - few) / 40 == pytest.approx(step, rel=0.18 if step == 512 else 0.01)


def test_a_ring_of_two_slots_is_slower_than_one_of_four():
    two, four = (timed(*ring(slots, 60)).cycles for slots in (2, 4))
    assert two > 1.15 * four


def test_one_slot_makes_each_copy_serial():
    found = timed(*ring(1, 10))
    consumer = [wait for wait in found.waits if wait.warp == 0]
    assert [wait.serial for wait in consumer] == [False] + [True] * 9
    deep = timed(*ring(4, 40))
    assert sum(wait.serial for wait in deep.waits if wait.warp == 0) == 0


def test_programs_resident_together_share_the_tensor_cores():
    """A second program on the SM fills the gaps of the first one, and takes its cycles."""
    program, launch = ring(1, 20)
    alone = timed(program, launch).cycles
    launch.programs, launch.resident = [(0, 0, 0), (1, 0, 0)], 2
    together = timed(program, launch)
    assert alone < together.cycles < 1.6 * alone
    assert together.tensor == 2 * 20 * 4 * 128
    launch.resident = 1
    in_turn = timed(program, launch)
    assert in_turn.cycles == pytest.approx(2 * alone + MACHINE.next_block, rel=0.01)
    assert in_turn.blocks[1][0] == in_turn.blocks[0][1] + MACHINE.next_block


def test_two_waits_a_step_each_wait_for_their_own_copy():
    """Operands with an mbarrier each: the second wait does not count as the next step's."""
    program = Assembly()
    for address in (64, 72):
        program("SYNCS.EXCH.64", effects.InitMbarrier(address, 1), warps=[0])
    program("BAR.SYNC", effects.BarrierSync(0, None))
    for step in range(4):
        for number, address in enumerate((64, 72)):
            program("SYNCS.ARRIVE", effects.Arrive(address, 1, 4000 * (number + 1)), warps=[0])
            program("UTMALDG", effects.Copy(576 + 192 * number, 0, address, (0, 0)), warps=[0])
        for address in (64, 72):
            program("SYNCS.PHASECHK", effects.AwaitPhase(address, step & 1), stall=2)
    program.end()
    found = timed(program, SmLaunch(warps=4, boxes={576: 4000, 768: 8000}))
    ends = [wait.end for wait in found.waits if wait.warp == 1]
    assert [round(b - a) for a, b in zip(ends[::2], ends[1::2], strict=True)] == [200] * 4
    assert found.fetched == 4 * 12_000


def test_copies_whose_predicate_is_off_move_nothing():
    """The last steps of a loop that fetches ahead have no next tile: the copy issues, and copies nothing."""
    program = Assembly()
    program("SYNCS.EXCH.64", effects.InitMbarrier(64, 1))
    program("SYNCS.ARRIVE", effects.Arrive(64, 1, 4000))
    program("UTMALDG", effects.Copy(576, 0, 64, (0, 0)))
    program("@UP0 UTMALDG", lambda state: None)
    program("SYNCS.PHASECHK", effects.AwaitPhase(64, 0))
    program("@P0 STG [R2], R4", lambda state: None)
    program.end()
    found = timed(program, SmLaunch(boxes={576: 4000}, predicates={"UP0": False, "P0": False}))
    assert (found.fetched, found.stored) == (4000, 0)
    assert found.cycles == pytest.approx(100 + 550 + MACHINE.poll, abs=40)


def test_an_exit_whose_guard_is_off_does_not_end_the_warp():
    program = Assembly()
    program("@P0 EXIT", lambda state: None)
    program("FFMA R0, R1, R2, R3", stall=15)
    program.end()
    found = timed(program, SmLaunch(predicates={"P0": False}))
    assert found.instructions == 3
    assert [mark.step for mark in found.marks if mark.opcode == "EXIT"] == [2]


def test_a_scoreboard_counts_all_that_share_it():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0)
    program("S2R R1, SR_TID.X", writes=0)
    program("FADD R2, R0, R1", waits=(0,))
    program.end()
    found = timed(program)
    assert found.cycles == pytest.approx(MACHINE.load_latency, abs=10)
    assert found.stalls[0]["scoreboard: LDG"] > 500


def test_groups_of_asynchronous_copies_are_awaited_in_order():
    program = Assembly()
    for _ in range(3):
        program("LDGSTS [R0], [R2]", effects.Global(4000, 125, store=False, shared=True))
        program("LDGDEPBAR")
    for pending in (2, 1, 0):
        program(f"DEPBAR.LE SB0, {pending:#x}")
    program.end()
    found = timed(program)
    assert [round(wait.end) for wait in found.waits] == pytest.approx([650, 750, 850], abs=10)


def test_a_named_barrier_waits_for_its_own_threads():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0, warps=[3])
    program("BAR.SYNC", effects.BarrierSync(1, 64), warps=[0, 1])
    program("FADD R1, R1, R1", waits=(0,))
    program("BAR.SYNC", effects.BarrierSync(0, None))
    program.end()
    found = timed(program, SmLaunch(warps=4))
    assert found.stalls[0]["barrier"] == pytest.approx(550 + 2 * MACHINE.barrier, abs=30)


def test_registers_are_taken_once_others_have_given_them_back():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0, warps=[1])
    program("USETMAXREG.DEALLOC", effects.SetRegisters(24, acquire=False), waits=(0,), warps=[1])
    program("USETMAXREG.TRY_ALLOC", effects.SetRegisters(232, acquire=True), warps=[0])
    program.end()
    found = timed(program, SmLaunch(warps=2, registers=128))
    assert found.stalls[0]["registers"] == pytest.approx(MACHINE.load_latency, abs=20)


def test_a_warps_life_is_what_it_issues_and_what_it_waits_for():
    for slots in (1, 2, 4):
        found = timed(*ring(slots, 10))
        ends = {mark.warp: mark.time for mark in found.marks if mark.opcode == "EXIT"}
        for warp, stalls in enumerate(found.stalls):
            assert sum(stalls.values()) == pytest.approx(ends[warp], abs=60)


def test_a_copy_into_both_blocks_takes_half_of_what_l2_serves():
    """20,000 bytes at 40 a cycle; both of a pair get all of them, and each SM's share is half."""
    cycles = {}
    for blocks in (1, 2):
        program = Assembly()
        program("SYNCS.EXCH.64", effects.InitMbarrier(64, 1))
        program("SYNCS.ARRIVE", effects.Arrive(64, 1, 20_000))
        program("UTMALDG.2D", effects.Copy(576, 0, 64, (0, 0), blocks))
        program("SYNCS.PHASECHK", effects.AwaitPhase(64, 0), writes=0)
        program("FADD R5, R4, R4", waits=(0,))
        program.end()
        found = timed(program, SmLaunch(boxes={576: 20_000}))
        cycles[blocks] = found.cycles
        assert (found.fetched, found.copied) == (20_000 // blocks, 20_000)
    assert cycles[1] == pytest.approx(500 + MACHINE.copy_latency, abs=60)
    assert cycles[1] - cycles[2] == 250


def test_the_other_block_of_a_pair_arrives_as_much_later_as_it_is_away():
    cycles = {}
    for count, remote in ((1, False), (2, True)):
        program = Assembly()
        program("SYNCS.EXCH.64", effects.InitMbarrier(64, count))
        program("SYNCS.ARRIVE", effects.Arrive(64, 1, 0, remote))
        program("SYNCS.PHASECHK", effects.AwaitPhase(64, 0), writes=0)
        program("FADD R5, R4, R4", waits=(0,))
        program.end()
        cycles[remote] = timed(program).cycles
    assert cycles[True] - cycles[False] == pytest.approx(MACHINE.remote + MACHINE.poll, abs=5)


def test_a_copy_into_more_blocks_than_a_pair_is_not_known():
    program = Assembly()
    program("SYNCS.EXCH.64", effects.InitMbarrier(64, 1))
    program("UTMALDG.2D", effects.Copy(576, 0, 64, (0, 0), 4))
    program.end()
    with pytest.raises(UnknownBox, match="a copy goes into 4 blocks, and the clock knows pairs"):
        timed(program, SmLaunch(boxes={576: 20_000}))
