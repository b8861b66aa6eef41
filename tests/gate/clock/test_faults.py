"""Each fault that the clock's SM must find, planted."""

import pytest

from tests.gate.clock.assembler import Assembly, SmLaunch, ring, timed
from tpkernels.gate.clock import effects
from tpkernels.gate.clock.effects import ClockFault, Deadlock, NeverEnds
from tpkernels.gate.clock.table import Operation


def program(*instructions):
    built = Assembly()
    for text, does, *waits in instructions:
        built(text, does, waits=tuple(waits))
    built.end()
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
        timed(short)


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
    lonely.end()
    told = "warp 0, BAR at 0x20: waits for the other warps of its block at their barrier; .* warp 1, SYNCS"
    with pytest.raises(Deadlock, match=told):
        timed(lonely, SmLaunch(warps=2))


def test_a_product_that_one_warp_of_the_group_does_not_issue():
    lonely = Assembly()
    lonely("BRA", effects.Jump(3), warps=[3])
    lonely("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0")
    lonely("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    lonely.end()
    with pytest.raises(Deadlock, match="not all 4 warps"):
        timed(lonely, SmLaunch(warps=4))


def test_a_scoreboard_that_nothing_sets():
    with pytest.raises(ClockFault, match="FADD at 0x0: nothing sets scoreboard 3"):
        timed(program(("FADD R0, R1, R2", None, 3)))


def test_a_warp_may_jump_over_what_sets_a_scoreboard():
    skipping = Assembly()
    skipping("BRA", effects.Jump(2))
    skipping("LDG.E R0, [R2]", effects.Global(128, 4, store=False, shared=False), writes=3)
    skipping("FADD R0, R1, R2", waits=(3,))
    skipping.end()
    assert timed(skipping).cycles < 100


@pytest.mark.parametrize(
    "effect",
    [effects.Arrive(72, 1, 0), effects.AwaitPhase(72, 0), effects.Copy(576, 72)],
    ids=["arrive", "await", "copy"],
)
def test_an_mbarrier_that_was_not_made(effect):
    with pytest.raises(ClockFault, match="no mbarrier at 0x48; there are: 0x40"):
        timed(program(MAKE, ("SYNCS", effect)), SmLaunch(boxes={576: 4096}))


def test_bytes_and_arrivals_that_no_mbarrier_expects():
    with pytest.raises(ClockFault, match="address is unknown"):
        timed(program(MAKE, ("SYNCS", effects.Arrive(None, 1, 0))))
    few = program(MAKE, ("SYNCS", effects.Arrive(64, 1, 2048)), ("UTMALDG", effects.Copy(576, 64)))
    with pytest.raises(ClockFault, match="a copy brings 4096 bytes to mbarrier 0x40"):
        timed(few, SmLaunch(boxes={576: 4096}))
    twice = program(MAKE, ("SYNCS", effects.Arrive(64, 1, 64)), ("SYNCS", effects.Arrive(64, 1, 64)))
    with pytest.raises(ClockFault, match="1 more arrivals at mbarrier 0x40"):
        timed(twice)
    copy = program(MAKE, ("UTMALDG", effects.Copy(None, 64)))
    with pytest.raises(ClockFault, match="descriptor is unknown; boxes are known of: 0x240"):
        timed(copy, SmLaunch(boxes={576: 4096}))
