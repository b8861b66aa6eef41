"""What is read off a disassembly."""

from tpkernels.kernels import machine_code

SERIALISED = """
        /*3b30*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR48], R88, gsb0 ;
        /*3c10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3c20*/              @!P0 LDGSTS.E.BYPASS.128 [R3], [R2.64] ;
        /*3c30*/                   LDGSTS.E [R3], [R2.64] ;
"""


def test_sass_is_counted_by_family_and_width():
    assert machine_code.sass_mix(SERIALISED) == {"HGMMA": 1, "LDGSTS": 2, "LDGSTS.128": 1, "all": 4}
    assert machine_code.wgmma_in_flight(SERIALISED) == 0
    assert machine_code.wgmma_in_flight(SERIALISED.replace("0x0 ;", "0x1 ;")) == 1
