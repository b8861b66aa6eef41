"""Control fields and operands, read off a listing."""

from __future__ import annotations

from tpkernels.gate.clock.instructions import parse

LISTING = """
        /*0190*/                   BRX R2 -0x1a0 ;    /* 0xfffffffc02987949 */
            /* 0x000fea000383ffff */
        /*01a0*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64.reuse+0x10] ;    /* 0x0000000402047981 */
            /* 0x008ea2000c1e1d00 */
        /*01b0*/                   IADD3 R2, P6, R7.reuse, c[0x0][0x210], RZ ;    /* 0x0000000402047981 */
            /* 0x000fc40007ffe0ff */
        /*01c0*/               @PT NOP;    /* 0x0000000000007918 */
            /* 0x000fc00000000000 */
"""


def test_operands_and_control_fields_are_read_off_a_listing():
    assert [(one.opcode, one.modifiers, one.guard, one.operands) for one in parse(LISTING)] == [
        ("BRX", (), "", ("R2 -0x1a0",)),
        ("LDG", ("E", "128"), "!P0", ("R4", "desc[UR6][R2.64+0x10]")),
        ("IADD3", (), "", ("R2", "P6", "R7", "c[0x0][0x210]", "RZ")),
        ("NOP", (), "", ()),
    ]
    fields = [(one.stall, one.yields, one.writes, one.reads, one.waits) for one in parse(LISTING)]
    assert fields == [
        (5, False, None, None, ()),
        (1, False, 2, None, (3,)),
        (2, True, None, None, ()),
        (0, True, None, None, ()),
    ]
    assert str(parse(LISTING)[1]) == "0x01a0 @!P0 LDG.E.128 R4, desc[UR6][R2.64+0x10]"
