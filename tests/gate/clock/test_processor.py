"""The clock's SM on programs whose cycles follow from its constants; and planted faults that it finds."""

import pytest

from tests.gate.clock.assembler import Assembly, SmLaunch, ring, timed
from tpkernels.gate.clock import effects, resources
from tpkernels.gate.clock.effects import ClockFault, Deadlock, NeverEnds
from tpkernels.gate.clock.table import Operation

PRODUCT = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"


def test_two_warps_take_turns_on_one_pipe():
    program = Assembly()
    for _ in range(100):
        program("MUFU.TANH R0, R1")
    alone = timed(program)
    together = timed(program, SmLaunch(warps=5))  # warps 0 and 4 share a scheduler
    assert alone.cycles == pytest.approx(100 * 8, abs=10)
    assert together.cycles == pytest.approx(200 * 8, abs=10)
    assert together.stalls[0]["xu"] == pytest.approx(100 * 15, rel=0.02)


def test_a_scheduler_issues_one_instruction_a_cycle():
    program = Assembly()
    for _ in range(100):
        program("FFMA R0, R1, R2, R3")
    assert timed(program, SmLaunch(warps=4)).cycles == pytest.approx(100, abs=3)
    assert timed(program, SmLaunch(warps=16)).cycles == pytest.approx(400, abs=6)


def test_a_fence_waits_until_stores_are_seen_in_its_scope():
    cycles = {}
    for scope in ("CTA", "GPU", "SYS"):
        program = Assembly()
        program("STG [R2], R0", effects.Global(96_000, 3_000, store=True, shared=False))
        program(f"MEMBAR.ALL.{scope}")
        cycles[scope] = timed(program).cycles
    drained = 96_000 / resources.STORE
    assert cycles["CTA"] < 50  # memory that the block shares answers in order
    assert cycles["GPU"] == pytest.approx(drained + resources.GPU_FENCE, abs=10)
    assert cycles["SYS"] == pytest.approx(drained + resources.SYSTEM_FENCE, abs=10)


def test_products_run_at_the_peak_when_their_operands_are_there():
    program = Assembly()
    for _ in range(32):
        program(PRODUCT)
    program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    one = timed(program, SmLaunch(warps=4))
    assert one.cycles == pytest.approx(32 * 128 + resources.DRAIN, abs=20)
    assert one.tensor == 32 * 128
    two = timed(program, SmLaunch(warps=8))
    assert two.cycles == pytest.approx(64 * 128 + resources.DRAIN, abs=20)


def test_a_product_of_fp8_is_twice_as_deep():
    program = Assembly()
    for _ in range(32):
        program("QGMMA.64x128x32.F32.E4M3.E5M2 R24, gdesc[UR8], R24, gsb0")
    program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    found = timed(program, SmLaunch(warps=4))
    assert found.tensor == 32 * 64  # 8,192 operations a cycle
    # shared memory: a product's operands, and beside it copies that may land
    assert found.cycles == pytest.approx(32 * 64 + resources.DRAIN, abs=20)


def test_a_product_starts_when_all_four_warps_have_issued_it():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0, warps=[2])
    program(PRODUCT, waits=(0,))
    program("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    found = timed(program, SmLaunch(warps=4))
    assert found.cycles == pytest.approx(550 + 128 + resources.DRAIN, abs=20)
    assert found.stalls[0]["products"] == pytest.approx(550 + 128 + resources.DRAIN, abs=30)


@pytest.mark.parametrize(("size", "step"), [(20_000, 4 * 128), (40_000, 1000)], ids=["products", "copies"])
def test_a_deep_ring_is_bound_by_the_slower_side(size, step):
    few, many = (timed(*ring(4, steps, size)).cycles for steps in (20, 60))
    assert (many - few) / 40 == pytest.approx(step, rel=0.18 if step == 512 else 0.01)


def test_a_ring_of_two_slots_is_slower_than_four():
    two, four = (timed(*ring(slots, 60)).cycles for slots in (2, 4))
    assert two > 1.15 * four


def test_one_slot_makes_each_copy_serial():
    assert timed(*ring(1, 10)).serial_loads[0] == 9  # all but the first
    assert timed(*ring(4, 40)).serial_loads[0] == 0


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
    assert in_turn.cycles == pytest.approx(2 * alone + resources.NEXT_BLOCK, rel=0.01)
    assert in_turn.blocks == 2


def test_copies_whose_predicate_is_off_move_nothing():
    """The last steps of a loop that fetches ahead have no next tile: the copy issues, and copies nothing."""
    program = Assembly()
    program("SYNCS.EXCH.64", effects.InitMbarrier(64, 1))
    program("SYNCS.ARRIVE", effects.Arrive(64, 1, 4000))
    program("UTMALDG", effects.Copy(576, 64))
    program("@UP0 UTMALDG", lambda state: None)
    program("SYNCS.PHASECHK", effects.AwaitPhase(64, 0))
    program("@P0 STG [R2], R4", lambda state: None)
    found = timed(program, SmLaunch(boxes={576: 4000}, predicates={"UP0": False, "P0": False}))
    assert (found.fetched, found.stored) == (4000, 0)
    assert found.cycles == pytest.approx(100 + 550 + resources.POLL, abs=40)


def test_an_exit_whose_guard_is_off_ends_nothing():
    program = Assembly()
    program("@P0 EXIT", lambda state: None)
    program("FFMA R0, R1, R2, R3", stall=15)
    found = timed(program, SmLaunch(predicates={"P0": False}))
    assert (found.instructions, found.blocks) == (3, 1)


def test_a_scoreboard_counts_all_that_share_it():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0)
    program("S2R R1, SR_TID.X", writes=0)
    program("FADD R2, R0, R1", waits=(0,))
    found = timed(program)
    assert found.cycles == pytest.approx(resources.LOAD_LATENCY, abs=10)
    assert found.stalls[0]["scoreboard: LDG"] > 500


@pytest.mark.parametrize(("pending", "cycles"), [(2, 650), (1, 750), (0, 850)])
def test_groups_of_asynchronous_copies_are_awaited_in_order(pending, cycles):
    program = Assembly()
    for _ in range(3):
        program("LDGSTS [R0], [R2]", effects.Global(4000, 125, store=False, shared=True))
        program("LDGDEPBAR")
    program(f"DEPBAR.LE SB0, {pending:#x}")
    found = timed(program)
    assert found.cycles == pytest.approx(cycles, abs=10)
    assert found.stalls[0]["copies"] == pytest.approx(cycles, abs=10)


def test_a_barrier_waits_for_all_warps_that_still_run():
    program = Assembly()
    program("LDG R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=0, warps=[3])
    program("EXIT", effects.Exit(), warps=[1])
    program("FADD R1, R1, R1", waits=(0,))
    program("BAR.SYNC", effects.BarrierSync())
    found = timed(program, SmLaunch(warps=4))
    assert found.stalls[0]["barrier"] == pytest.approx(550 + resources.BARRIER, abs=30)
    assert found.cycles == pytest.approx(550 + resources.BARRIER, abs=30)


def test_the_last_warp_lives_for_its_instructions_and_waits():
    for slots in (1, 2, 4):
        found = timed(*ring(slots, 10))
        assert max(sum(stalls.values()) for stalls in found.stalls) == pytest.approx(found.cycles, abs=60)


def assembled(*instructions):
    built = Assembly()
    for text, does, *waits in instructions:
        built(text, does, waits=tuple(waits))
    return built


MAKE = ("SYNCS.EXCH.64", effects.InitMbarrier(64, 1))


def test_a_path_without_an_end():
    endless = Assembly()
    endless("BRA", effects.Jump(0))
    with pytest.raises(NeverEnds, match=r"block 0 warp 0, BRA at 0x0: no end after 1000"):
        timed(endless, budget=1000)
    short = Assembly()
    short("NOP")
    with pytest.raises(NeverEnds, match="past the last instruction"):
        timed(short, ends=False)


def test_a_slot_that_is_never_freed():
    stuck, launch = ring(2, 6)
    stuck.steps = [
        Operation(step.instruction, None) if step.instruction.modifiers == ("ARRIVE", "A1T0") else step
        for step in stuck.steps
    ]
    with pytest.raises(Deadlock, match=r"warp 4, SYNCS at .* waits for mbarrier 0x100, whose phase 0"):
        timed(stuck, launch)


def test_a_barrier_that_one_warp_never_reaches():
    lonely = Assembly()
    lonely("SYNCS.EXCH.64", effects.InitMbarrier(64, 1))
    lonely("SYNCS.PHASECHK", effects.AwaitPhase(64, 0), warps=[1])
    lonely("BAR.SYNC", effects.BarrierSync())
    told = "warp 0, BAR at 0x20: waits for the other warps of its block at their barrier; .* warp 1, SYNCS"
    with pytest.raises(Deadlock, match=told):
        timed(lonely, SmLaunch(warps=2))


def test_a_product_that_one_warp_does_not_issue():
    lonely = Assembly()
    lonely("BRA", effects.Jump(3), warps=[3])
    lonely("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0")
    lonely("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    with pytest.raises(Deadlock, match="not all 4 warps"):
        timed(lonely, SmLaunch(warps=4))


def test_a_scoreboard_that_nothing_sets():
    with pytest.raises(ClockFault, match="FADD at 0x0: nothing sets scoreboard 3"):
        timed(assembled(("FADD R0, R1, R2", None, 3)))


def test_a_warp_may_jump_over_what_sets_a_scoreboard():
    skipping = Assembly()
    skipping("BRA", effects.Jump(2))
    skipping("LDG.E R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=3)
    skipping("FADD R0, R1, R2", waits=(3,))
    assert timed(skipping).cycles < 100


@pytest.mark.parametrize(
    "effect",
    [effects.Arrive(72, 1, 0), effects.AwaitPhase(72, 0), effects.Copy(576, 72)],
    ids=["arrive", "await", "copy"],
)
def test_an_mbarrier_that_was_not_made(effect):
    with pytest.raises(ClockFault, match="no mbarrier at 0x48; there are: 0x40"):
        timed(assembled(MAKE, ("SYNCS", effect)), SmLaunch(boxes={576: 4096}))


def test_bytes_and_arrivals_that_no_mbarrier_expects():
    with pytest.raises(ClockFault, match="address is unknown"):
        timed(assembled(MAKE, ("SYNCS", effects.Arrive(None, 1, 0))))
    few = assembled(MAKE, ("SYNCS", effects.Arrive(64, 1, 2048)), ("UTMALDG", effects.Copy(576, 64)))
    with pytest.raises(ClockFault, match="a copy brings 4096 bytes to mbarrier 0x40"):
        timed(few, SmLaunch(boxes={576: 4096}))
    twice = assembled(MAKE, ("SYNCS", effects.Arrive(64, 1, 64)), ("SYNCS", effects.Arrive(64, 1, 64)))
    with pytest.raises(ClockFault, match="1 more arrivals at mbarrier 0x40"):
        timed(twice)
    copy = assembled(MAKE, ("UTMALDG", effects.Copy(None, 64)))
    with pytest.raises(ClockFault, match="descriptor is unknown; boxes are known of: 0x240"):
        timed(copy, SmLaunch(boxes={576: 4096}))
