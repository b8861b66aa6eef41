"""What is read off a disassembly."""

from tpkernels.gate import disassembly

SERIALISED = """
        /*3b30*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR48], R88, gsb0 ;
        /*3c10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3c20*/              @!P0 LDGSTS.E.BYPASS.128 [R3], [R2.64] ;
        /*3c30*/                   LDGSTS.E [R3], [R2.64] ;
"""


def test_sass_is_counted_by_family_and_width():
    assert disassembly.sass_mix(SERIALISED) == {"HGMMA": 1, "LDGSTS": 2, "LDGSTS.128": 1, "all": 4}
    assert disassembly.wgmma_in_flight(SERIALISED) == 0
    assert disassembly.wgmma_in_flight(SERIALISED.replace("0x0 ;", "0x1 ;")) == 1


# fp8 that is promoted: a batch of two products, the first of which is added to zero, is awaited, and then
# once more, when nothing is in flight
PROMOTED = """
        /*0e20*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], RZ, !UPT ;
        /*0e70*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], R24, gsb0 ;
        /*0e80*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0e90*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0ea0*/                   QMMA.16832.F32.E5M2.E4M3 R16, R36.ROW, R28.COL, RZ ;
"""


def test_products_of_fp8_are_counted_by_where_they_stand_in_a_sum():
    counts = {"QGMMA": 2, "QGMMA.RZ": 1, "QGMMA.gsb0": 1, "QMMA": 1, "QMMA.RZ": 1, "all": 5}
    assert disassembly.sass_mix(PROMOTED) == counts
    assert disassembly.wgmma_in_flight(PROMOTED) == 0
    product = PROMOTED.splitlines()[2]
    awaited_later = PROMOTED.replace("gsb0, 0x0 ;\n", f"gsb0, 0x0 ;\n{product}\n")
    assert disassembly.wgmma_in_flight(awaited_later) == 1


AMD = """
	v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, v[0:15]
	v_mfma_f32_16x16x8_xf32 a[0:3], v[4:5], v[6:7], a[0:3]
	ds_read_b128 v[4:7], v8
	s_waitcnt lgkmcnt(0)
	.vgpr_count:     94
	.vgpr_spill_count: 2
	.sgpr_spill_count: 3
	.private_segment_fixed_size: 20
"""


def test_amd_assembly_is_counted_by_family_and_short_products_apart():
    assert disassembly.amd_mix(AMD) == {"v_mfma": 2, "v_mfma.xf32": 1, "ds_read": 1, "all": 4}
    assert disassembly.amd_resources(AMD) == (94, 20, 5)
